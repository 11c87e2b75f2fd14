"""Generates answers: reads the prompt in chunks, then computes one token after the other, each in a forward pass."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Iterator

import torch

from core.quality.meter import Meter
from core.runtime.kv_cache import KVCache
from core.runtime.pipeline import Pipeline
from core.session.answer import AnswerBuilder
from core.session.loading import LoadedModel
from core.session.sampler import Draw, Sampler
from core.session.sequence import Sequence
from core.session.settings_controller import EngineParts, SettingsController
from core.settings.sampling import Sampling
from core.types import Phase, Piece, StepRecord


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

    def answer(
        self, ids: list[int], sampling: Sampling, cancel: threading.Event, submitted_s: float, draw: Draw | None
    ) -> Iterator[Piece]:
        """Stream the continuation of a prompt, which leaves room for at least one token; ends all that it began."""
        loaded, parts, room = self._loaded, self._parts, self._loaded.plan.context - len(ids)
        limited = sampling.max_new_tokens > room
        answer = AnswerBuilder(
            loaded.prompt, ids, min(sampling.max_new_tokens, room), submitted_s, limited_by_context=limited
        )
        sequence = Sequence(list(ids), self._kv.fresh(), draw or Sampler(sampling, loaded.device))
        parts.predictor_host.request += 1
        self._meter.begin()
        parts.recorder.has_lossy_state = False
        try:
            token = yield from self._read(sequence, answer, cancel)
            while token is not None and not answer.take(token):
                yield answer.piece()
                if cancel.is_set() or answer.full:
                    break
                if parts.recorder.has_lossy_state and not self._controller.wanted.lossy.active:
                    yield from self._read_again(sequence, answer, cancel)
                    if cancel.is_set():
                        break
                sequence.ids.append(token)
                token, step = self._pass(sequence, 1, "decode")
                answer.count(step)
            yield Piece(
                "end",
                step=answer.last_step,
                stats=answer.stats(
                    cancelled=cancel.is_set(),
                    memory=parts.ledger.memory(loaded.store.bytes),
                    seed=sampling.seed,
                    closeness=loaded.plan.closeness,
                    audit=self._meter.end(ids, answer.tokens, answer.steps),
                ),
            )
        finally:
            self._pipeline.end()

    def _read(
        self, sequence: Sequence, answer: AnswerBuilder, cancel: threading.Event, *, draws: bool = True
    ) -> Generator[Piece, None, int | None]:
        """Prefill: compute the tokens of `sequence` in chunks, and draw the next one from the last chunk's logits."""
        token: int | None = None
        total = len(sequence.ids)
        while sequence.computed < total and not cancel.is_set():
            count = min(self._chunk, total - sequence.computed)
            last = sequence.computed + count == total
            token, step = self._pass(sequence, count, "prefill", draws=draws and last)
            answer.count(step)
            yield Piece("prefill", done=sequence.computed, total=total, step=step)
        return token

    def _read_again(self, sequence: Sequence, answer: AnswerBuilder, cancel: threading.Event) -> Iterator[Piece]:
        """Lossy options were turned off: compute the KV cache of the text so far exactly."""
        sequence.start_over(self._kv.fresh())
        self._parts.recorder.has_lossy_state = False
        yield from self._read(sequence, answer, cancel, draws=False)

    @torch.inference_mode()
    def _pass(
        self, sequence: Sequence, count: int, phase: Phase, *, draws: bool = True
    ) -> tuple[int | None, StepRecord]:
        """Compute the next `count` tokens of `sequence` in one forward pass; draw the one that follows."""
        started_s, parts, device = time.perf_counter(), self._parts, self._loaded.device
        self._controller.apply(parts)
        parts.ledger.begin()
        ids = sequence.ids[sequence.computed : sequence.computed + count]
        self._pipeline.begin(ids, phase)
        began_s = time.perf_counter()
        logits = self._pipeline.forward(ids, sequence.kv)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        model_s = time.perf_counter() - began_s
        sequence.computed += count
        token: int | None = None
        if draws:
            self._meter.keep(logits, self._controller.applied.lossy)
            token = sequence.draw(sequence.ids, logits)
        changes = self._controller.take_changes()
        step = parts.recorder.end(
            phase, count, started_s, model_s, parts.ledger.used(), parts.ledger.budget_bytes, changes
        )
        if parts.recorder.enabled:
            parts.telemetry.add(step)
        step.spent(time.perf_counter() - started_s)
        return token, step
