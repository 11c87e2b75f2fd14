"""Generates answers: reads the prompt in chunks, then computes one token after the other, each in a forward pass."""

import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress

from core.engine.answer import AnswerBuilder
from core.engine.passes import Passes
from core.engine.prefix_cache import PrefixCache
from core.engine.request_factory import RequestFactory
from core.engine.sampler import Draw
from core.engine.sequence import Sequence, Start
from core.engine.settings_controller import EngineParts, SettingsController
from core.runtime.kv_cache import KVCache
from core.runtime.pipeline import Pipeline, Stopped
from core.settings.sampling import Sampling
from core.types import Piece


class Generation:
    """For one model, one answer at a time. Requested settings are applied to `parts` before every pass."""

    def __init__(
        self,
        pipeline: Pipeline,
        kv: KVCache,
        controller: SettingsController,
        parts: EngineParts,
        passes: Passes,
        requests: RequestFactory,
    ) -> None:
        self._pipeline, self._kv, self._controller = pipeline, kv, controller
        self._passes, self._requests = passes, requests
        self._prefix_cache: PrefixCache = parts.memory.prefix_cache

    def answer(
        self,
        ids: list[int],
        sampling: Sampling,
        cancel: threading.Event,
        submitted_s: float,
        draw: Draw | None,
        *,
        begun: int = 0,
        reuse: bool = False,
        reading: Callable[[Piece], None] | None = None,
    ) -> Iterator[Piece]:
        """Stream the continuation of a prompt, which leaves room for at least one token; ends all that it began. The
        last `begun` tokens of the prompt are the answer's own. When
        `cancel` is set, the running pass is aborted before its next MoE layer and discarded. `reuse`:
        continue from a kept KV, and keep this one. `reading` gets the progress within a pass over the prompt, layer by
        layer."""
        draw = draw or self._requests.draw(ids, sampling, begun)
        start = (
            self._prefix_cache.begin(ids, self._prefix_cache.lossy_key(self._controller.wanted))
            if reuse
            else Start(self._kv.fresh())
        )
        active = self._requests.begin(
            ids, sampling, draw, start, cancel, submitted_s, begun=begun, kept=reuse, reading=reading
        )
        sequence = active.sequence
        try:
            with suppress(Stopped):
                yield from self._write(sequence, active.answer, len(ids))
            yield self._requests.end(active)
        finally:
            self._pipeline.end()
            self._passes.release_workspace()
            if reuse:
                self._prefix_cache.end(sequence.ids, sequence.prompt, sequence.kv, sequence.checkpoints)

    def _write(self, sequence: Sequence, answer: AnswerBuilder, total: int) -> Iterator[Piece]:
        """Read the first `total` tokens of `sequence`, then draw one after the other until it is over. Raises Stopped
        when it was cancelled in the middle of a pass."""
        tokens = yield from self._read(sequence, answer, total)
        while tokens:
            yield from answer.taken(tokens)
            if sequence.over:
                return
            if not sequence.kv.exact and not self._controller.wanted.lossy.active:
                yield from self._read_again(sequence, answer)
                if sequence.over:
                    return
            [tokens], step = self._passes.run("decode", (sequence, 1))
            answer.count(step)

    def _read(self, sequence: Sequence, answer: AnswerBuilder, total: int) -> Generator[Piece, None, list[int]]:
        """Prefill: compute the first `total` tokens of `sequence` in chunks -> the token that follows, if that is
        new."""
        tokens = list[int]()
        if sequence.taken_over or sequence.kept:
            yield Piece("prefill", done=sequence.computed, total=total, cached=sequence.cached)
        self._pipeline.announce((sequence.request, sequence.ids[sequence.computed : total][: self._passes.chunk]))
        while sequence.computed < total and not sequence.cancelled:
            left = total - sequence.computed
            count = self._passes.next_count(sequence, left, self._passes.max_chunk(left))
            [tokens], step = self._passes.run("prefill", (sequence, count), total=total)
            answer.count(step)
            if sequence.kept:
                sequence.remember(self._kv.checkpoint(sequence.kv))
            yield Piece("prefill", done=sequence.computed, total=total, cached=sequence.cached, step=step)
        return tokens

    def _read_again(self, sequence: Sequence, answer: AnswerBuilder) -> Iterator[Piece]:
        """Lossy options were turned off: compute the KV cache of the text so far exactly, without the newest token,
        which comes next."""
        sequence.start_over(self._kv.fresh())
        yield from self._read(sequence, answer, len(sequence.ids) - 1)
