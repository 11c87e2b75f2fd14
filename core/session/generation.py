"""Generates answers: reads the prompt in chunks, then computes one token after the other, each in a forward pass."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress

from core.quality.meter import Meter
from core.runtime.kv_cache import KVCache
from core.runtime.pipeline import Pipeline, Stopped
from core.session.answer import AnswerBuilder
from core.session.constraint import Constraints
from core.session.kept import KeptKVs, Start
from core.session.loading import LoadedModel
from core.session.logprobs import Logprobs
from core.session.passes import Passes
from core.session.sampler import Draw, Sampler
from core.session.sequence import Sequence, Stop
from core.session.settings_controller import EngineParts, SettingsController
from core.settings.sampling import Sampling
from core.types import AnswerStats, Piece


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
        passes: Passes,
        number: Callable[[], int],
    ) -> None:
        """`number()` is the next request's."""
        self._loaded, self._pipeline, self._kv, self._meter = loaded, pipeline, kv, meter
        self._controller, self._parts = controller, parts
        self._passes, self._number, self._constraints = passes, number, Constraints(loaded.prompt)
        self._kept: KeptKVs = parts.kept

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
            [token], step = self._passes.run("decode", (sequence, 1))
            answer.count(step)

    def _sequence(
        self, ids: list[int], sampling: Sampling, cancel: threading.Event, draw: Draw, *, reuse: bool
    ) -> Sequence:
        room = self._loaded.plan.context - len(ids)
        limited = sampling.max_new_tokens > room
        manner = self._kept.manner(self._controller.wanted)
        start = self._kept.begin(ids, manner) if reuse else Start(self._kv.fresh())
        return Sequence(
            self._number(),
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
        self._pipeline.announce((sequence.request, sequence.ids[sequence.computed : total][: self._passes.chunk]))
        while sequence.computed < total and not sequence.cancelled:
            count = self._passes.next_count(sequence, total - sequence.computed, self._passes.chunk)
            [token], step = self._passes.run("prefill", (sequence, count), total=total)
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
