"""Generates answers: reads the prompt in chunks, then computes one token after the other, each in a forward pass."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress

import torch

from core.errors import DeviceError, DeviceFullError
from core.quality.meter import Meter
from core.runtime.batch import Batch
from core.runtime.kv_cache import KVCache
from core.runtime.out_of_memory import shortage
from core.runtime.pipeline import Pipeline, Stopped
from core.session.answer import AnswerBuilder
from core.session.constraint import Constraints
from core.session.kept import KeptKVs, Start
from core.session.loading import LoadedModel
from core.session.logprobs import Logprobs
from core.session.sampler import Draw, Sampler
from core.session.sequence import Sequence, Stop
from core.session.settings_controller import EngineParts, SettingsController
from core.settings.sampling import Sampling
from core.types import AnswerStats, Phase, Piece, StepRecord

Work = tuple[tuple[Sequence, int], ...]
"""The next tokens, so many of each sequence, that one pass computes."""
FULL = (
    "The device ran out of memory: it has no room for {}. Lower the context or the budget, or close what else uses the "
    "device."
)


class Generation:
    """For one model, one answer at a time. Requested settings are applied to `parts` before every pass."""

    def __init__(
        self,
        loaded: LoadedModel,
        pipeline: Pipeline,
        kv: KVCache,
        meter: Meter,
        controller: SettingsController,
        parts: EngineParts,
    ) -> None:
        self._loaded, self._pipeline, self._kv, self._meter = loaded, pipeline, kv, meter
        self._controller, self._parts, self._chunk = controller, parts, loaded.sizes.chunk
        self._kept: KeptKVs = parts.kept
        self._requests, self._constraints = itertools.count(1), Constraints(loaded.prompt)

    def answer(
        self,
        ids: list[int],
        sampling: Sampling,
        cancel: threading.Event,
        submitted_s: float,
        draw: Draw | None,
        *,
        reuse: bool = False,
        reading: Callable[[Piece], None] | None = None,
    ) -> Iterator[Piece]:
        """Stream the continuation of a prompt, which leaves room for at least one token; ends all that it began. When
        `cancel` is set, the pass under way is broken off before its next MoE layer, and counts for nothing. `reuse`:
        continue from a kept KV, and keep this one. `reading` is told within a pass over the prompt, layer by layer, how
        far it is."""
        tokenizer, constraint = self._loaded.prompt.tokenizer, None
        if sampling.schema or sampling.grammar:
            constraint = self._constraints.of(sampling, len(ids))
        draw = draw or Sampler(sampling, self._loaded.device, len(ids), constraint)
        logprobs = None if sampling.logprobs is None else Logprobs(draw, tokenizer, sampling.logprobs)
        sequence = self._sequence(ids, sampling, cancel, logprobs or draw, reuse=reuse)
        sequence.reading = reading
        answer = AnswerBuilder(tokenizer, sequence, submitted_s, sampling.stop, logprobs)
        try:
            with suppress(Stopped):
                yield from self._write(sequence, answer, len(ids))
            yield Piece(
                "end", text=answer.rest(), step=answer.last_step, stats=self._stats(sequence, answer, sampling.seed)
            )
        finally:
            self._pipeline.end()
            if reuse:
                self._kept.end(sequence.ids, sequence.prompt, sequence.kv, sequence.moments)

    def _write(self, sequence: Sequence, answer: AnswerBuilder, total: int) -> Iterator[Piece]:
        """Read the first `total` tokens of `sequence`, then draw one after the other until it is over. Raises Stopped
        when it was cancelled in the middle of a pass."""
        token = yield from self._read(sequence, answer, total)
        while token is not None and answer.take(token):
            yield answer.piece()
            if sequence.over:
                return
            if not sequence.kv.exact and not self._controller.wanted.lossy.active:
                yield from self._read_again(sequence, answer)
                if sequence.over:
                    return
            [token], step = self._pass("decode", (sequence, 1))
            answer.count(step)

    def _sequence(
        self, ids: list[int], sampling: Sampling, cancel: threading.Event, draw: Draw, *, reuse: bool
    ) -> Sequence:
        room = self._loaded.plan.context - len(ids)
        limited = sampling.max_new_tokens > room
        manner = self._kept.manner(self._controller.wanted)
        start = self._kept.begin(ids, manner) if reuse else Start(self._kv.fresh())
        return Sequence(
            next(self._requests),
            list(ids),
            start.kv,
            draw,
            Stop(self._loaded.prompt.ends, min(sampling.max_new_tokens, room), limited, cancel),
            self._meter.begin(),
            kept=reuse,
            begun=start.moment,
        )

    def _stats(self, sequence: Sequence, answer: AnswerBuilder, seed: int) -> AnswerStats:
        given, drawn = sequence.ids[: sequence.prompt], sequence.ids[sequence.prompt :]
        return answer.stats(
            self._parts.ledger.memory(self._loaded.store.bytes, self._loaded.store.unpinned_bytes),
            seed,
            self._meter.end(sequence.sample, given, drawn, answer.steps),
            self._loaded.plan.closeness,
            self._loaded.plan.weights,
        )

    def _read(self, sequence: Sequence, answer: AnswerBuilder, total: int) -> Generator[Piece, None, int | None]:
        """Prefill: compute the first `total` tokens of `sequence` in chunks -> the token that follows, if that is
        new."""
        token: int | None = None
        if sequence.taken_over or sequence.kept:
            yield Piece("prefill", done=sequence.computed, total=total, cached=sequence.cached)
        self._pipeline.announce(sequence.ids[sequence.computed : total][: self._chunk], sequence.request)
        while sequence.computed < total and not sequence.cancelled:
            count = min(self._chunk, total - sequence.computed)
            [token], step = self._pass("prefill", (sequence, count), total=total)
            answer.count(step)
            if sequence.kept:
                sequence.remember(self._kv.moment(sequence.kv))
            yield Piece("prefill", done=sequence.computed, total=total, cached=sequence.cached, step=step)
        return token

    def _read_again(self, sequence: Sequence, answer: AnswerBuilder) -> Iterator[Piece]:
        """Lossy options were turned off: compute the KV cache of the text so far exactly, without the newest token,
        which comes next."""
        sequence.start_over(self._kv.fresh())
        yield from self._read(sequence, answer, len(sequence.ids) - 1)

    @torch.inference_mode()
    def _pass(self, phase: Phase, *work: tuple[Sequence, int], total: int = 0) -> tuple[list[int | None], StepRecord]:
        """Compute the next tokens, so many of each sequence, in one forward pass; draw the token that follows where all
        of a sequence's are computed. `total` = tokens of a prompt that is read in several passes.

        When the device runs out of memory, some slots are freed and the pass is made once more. Raises DeviceFullError
        when that does not help, and DeviceError for other errors that a GPU reports.
        """
        try:
            return self._once(phase, work, total)
        except RuntimeError as error:
            lack = self._shortage(error)
        # the error is gone by now, and with it what the frames of the pass held
        self._make_room(work, lack)
        try:
            return self._once(phase, work, total)
        except RuntimeError as error:
            raise DeviceFullError(FULL.format(self._shortage(error))) from error

    def _shortage(self, error: RuntimeError) -> str:
        """What the device had no memory for. Any other error is raised."""
        lack = shortage(error)
        if lack:
            return lack
        if self._loaded.device.type == "cuda" and "CUDA error" in str(error):
            raise DeviceError.of(error) from error
        raise error

    def _make_room(self, work: Work, lack: str) -> None:
        """After a pass that broke off: take back what it did, and free some slots. Raises DeviceFullError when there
        are none to free, or what it did cannot be taken back."""
        self._parts.expert_cache.abandon()
        for sequence, _ in work:
            if not self._kv.taken_back(sequence.kv, sequence.moments):
                raise DeviceFullError(FULL.format(lack))
        if not self._controller.make_room(self._parts):
            raise DeviceFullError(FULL.format(lack))

    def _once(self, phase: Phase, work: Work, total: int) -> tuple[list[int | None], StepRecord]:
        """One forward pass, as `_pass` describes it."""
        started_s, parts, device = time.perf_counter(), self._parts, self._loaded.device
        self._controller.apply(parts)
        parts.ledger.begin()
        batch = Batch(phase, tuple([sequence.share(count) for sequence, count in work]))
        self._pipeline.begin(batch)
        held, taken_over = [sequence.computed for sequence, _ in work], sum(sequence.taken_over for sequence, _ in work)
        for sequence, count in work:  # of a prompt: its next part is searched for while this one is computed
            if part := sequence.ids[sequence.computed + count :][: self._chunk]:
                self._pipeline.announce(part, sequence.request)
        layers = self._loaded.shape.layers

        def stop(layer: int) -> bool:
            for sequence, count in work if phase == "prefill" else ():
                sequence.reached(layer, layers, count, total)
            return all(sequence.cancelled for sequence, _ in work)

        began_s = time.perf_counter()
        logits = self._pipeline.forward(batch, stop=stop)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        model_s = time.perf_counter() - began_s
        try:
            tokens = [self._draw(sequence, row) for (sequence, _), row in zip(work, logits.split(1), strict=True)]
        except BaseException:
            for (sequence, _), start in zip(work, held, strict=True):
                sequence.kv.broke_off(start)
            raise
        for (sequence, _), token in zip(work, tokens, strict=True):
            if token is not None and sequence.continues(token):
                self._pipeline.announce([token], sequence.request)
        changes = self._controller.take_changes()
        step = parts.recorder.end(started_s, model_s, parts.ledger.used(), parts.ledger.budget_bytes, changes)
        if not step.lossless:
            manner = self._kept.manner(self._controller.applied)
            for (sequence, _), start in zip(work, held, strict=True):
                sequence.kv.mark_lossy(start, manner)
        step.cached_tokens = taken_over
        step.exact = all(sequence.kv.exact for sequence, _ in work)
        if parts.recorder.enabled:
            parts.telemetry.add(step)
        step.spent(time.perf_counter() - started_s)
        return tokens, step

    def _draw(self, sequence: Sequence, logits: torch.Tensor) -> int | None:
        """The token that follows, from logits [1, V]; None while tokens of the sequence are left to compute."""
        if sequence.computed < len(sequence.ids):
            return None
        lossy = self._controller.applied.lossy
        if lossy.active:
            sequence.sample.keep(sequence.drawn, logits[0], lossy.quality_rate)
        return sequence.draw(sequence.ids, logits)
