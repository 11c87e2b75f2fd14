"""Answers many prompts together: sequences join when there is room for their KV, and leave when they have ended.

New prompts are read several at a time; then each pass computes the next token of every sequence. An expert that several
of them need is fetched once, and computed once for all of their tokens.
"""

import threading
import time
from collections import deque
from collections.abc import Hashable, Iterable, Iterator
from contextlib import suppress
from itertools import accumulate

import numpy as np

from core.engine.batch_groups import SCHEDULED, BatchGroups, Running
from core.engine.batch_request import BatchPiece, BatchRequest, Regrouped
from core.engine.batch_trial import BatchTrial
from core.engine.loading import LoadedModel
from core.engine.passes import Passes
from core.engine.request_factory import RequestFactory
from core.engine.sequence import Sequence, Start
from core.engine.settings_controller import EngineParts, SettingsController
from core.errors import ContextError, MoestroError, PromptError
from core.hf.text_to_text import decoder_shape
from core.policy.batching import Scheduler
from core.runtime.kv_cache import KVCache
from core.runtime.kv_pool import KVPool
from core.runtime.pipeline import Pipeline, Stopped
from core.types import Phase, Piece

JOIN = 4  # new sequences join when a quarter of the places is free


class Either:
    """Set when any of some events is."""

    def __init__(self, *events: threading.Event | None) -> None:
        self._events = [one for one in events if one is not None]

    def is_set(self) -> bool:
        """Whether one of them is."""
        return any(one.is_set() for one in self._events)


def _refusal(key: Hashable, error: MoestroError) -> BatchPiece:
    """The piece of a request that cannot be answered."""
    too_long = isinstance(error, ContextError)
    return BatchPiece(key, None, str(error), too_long or isinstance(error, PromptError), too_long)


class Batching:
    """For one model. Requested settings are applied before every pass."""

    def __init__(
        self,
        loaded: LoadedModel,
        pipeline: Pipeline,
        pool: KVPool,
        trial: BatchTrial,
        passes: Passes,
        controller: SettingsController,
        parts: EngineParts,
        requests: RequestFactory,
    ) -> None:
        self._loaded, self._pipeline, self._pool, self._trial = loaded, pipeline, pool, trial
        self._passes, self._controller, self._parts, self._requests = passes, controller, parts, requests
        self.regrouped: deque[Regrouped] = deque(maxlen=SCHEDULED)  # the last times
        self._groups = self._dividing(None, 0, pipelined=False)

    def run(
        self,
        requests: Iterable[BatchRequest | None],
        limit: int,
        cancel: threading.Event,
        *,
        scheduler: Scheduler | None = None,
        pipelined: bool = False,
    ) -> Iterator[BatchPiece]:
        """Answer all requests, at most `limit` at a time; the next is taken when there is room, and None means that
        there is none now: the next is tried again after each pass, until nothing runs. When `cancel` is set, the
        running pass is aborted and all its requests end as cancelled. With a `scheduler` twice as many are at work, in
        two batches that it chooses anew for every token; `pipelined` four times as many, as in
        `core.engine.batch_groups`."""
        self.regrouped.clear()
        self._groups = groups = self._dividing(scheduler, limit, pipelined=pipelined)
        source, running, limit, places = iter(requests), list[Running](), groups.places, groups.places
        asked: BatchRequest | None = None
        try:
            while not cancel.is_set():
                if len(running) <= places - max(1, places // JOIN):
                    places = limit  # some have left: there may be room for more than there was
                while len(running) < places:
                    asked = next(source, None) if asked is None else asked
                    if asked is None or not self._may_join(asked, running, places):
                        break
                    try:
                        fresh = self._joined(asked, running, limit, cancel)
                    except MoestroError as error:
                        yield _refusal(asked.key, error)
                        asked = None
                        continue
                    if fresh is None:
                        places = len(running)
                        break
                    groups.join(fresh, running)
                    running.append(fresh)
                    asked = None
                yield from self._ended(running)
                if not running:
                    asked = next(source, None) if asked is None else asked
                    if asked is None:
                        return
                    continue
                self._exactly(running)
                with suppress(Stopped):
                    yield from self._read([one for one in running if one.unread])
                    yield from self._ended(running)
                    yield from self._decode([one for one in running if not one.unread])
            while running:
                yield self._end(running.pop(0))
        finally:
            groups.close()
            self._pipeline.end()
            self._passes.release_workspace()
            for one in running:
                self._leave(one.sequence)
            self._pool.clear()

    # ------------------------------------------------------------------ joining and leaving

    def _may_join(self, asked: BatchRequest, running: list[Running], places: int) -> bool:
        """A pass over prompts needs nearly all experts, however short they are: several join together. Chats do not
        wait for others."""
        reads = any(not one.sequence.drawn for one in running)
        free = len(running) <= places - max(1, places // JOIN)
        return len(running) < places and (asked.reuse or reads or not running or free)

    def _joined(
        self, request: BatchRequest, running: list[Running], limit: int, cancel: threading.Event
    ) -> Running | None:
        """A sequence for the request; None while there is no room for its KV, or it cannot be computed together with
        those at work. Raises MoestroError."""
        sampling, factory = request.sampling.drawn(), self._requests
        ids = self._loaded.prompt.encode(request.messages, self._loaded.plan.context)
        begun = self._loaded.prompt.begun(request.messages, ids)
        longest = max([len(ids) + factory.most(ids, sampling), *[one.sequence.longest for one in running]])
        trial = self._trial
        if limit > 1 and (running or trial.waits) and not trial.allows(longest, cancel.is_set) and running:
            return None
        draw = factory.draw(ids, sampling, begun)
        memory: KVCache | None = None
        if request.reuse and self._pool.has_chat_room:
            self._pool.chatting = True
        elif (kv := self._pool.take(len(ids) + factory.most(ids, sampling))) is not None:
            memory, start = kv.memory, Start(kv)
        else:
            return None
        if request.reuse:
            kept = self._parts.memory.prefix_cache
            start = kept.begin(ids, kept.lossy_key(self._controller.wanted), memory)
        ends, submitted_s = Either(request.cancel, cancel), time.perf_counter()
        active = factory.begin(
            ids, sampling, draw, start, ends, submitted_s, begun=begun, kept=request.reuse, reading=request.reading
        )
        return Running(request.key, active)

    def _ended(self, running: list[Running]) -> Iterator[BatchPiece]:
        """Those that are over leave, and give their room to others."""
        for one in [one for one in running if one.sequence.over]:
            running.remove(one)
            yield self._end(one)

    def _end(self, one: Running) -> BatchPiece:
        last = self._requests.end(one.active)
        self._leave(one.sequence)
        return BatchPiece(one.key, last)

    def _leave(self, sequence: Sequence) -> None:
        if sequence.kept:
            self._parts.memory.prefix_cache.end(sequence.ids, sequence.prompt, sequence.kv, sequence.checkpoints)
        self._pool.give_back(sequence.kv)

    # ------------------------------------------------------------------ passes

    def _exactly(self, running: list[Running]) -> None:
        """Where lossy options were turned off, what they touched is to be computed again."""
        if self._controller.wanted.lossy.active:
            return
        for sequence in [one.sequence for one in running if not one.sequence.kv.exact]:
            sequence.start_over(sequence.kv.memory.fresh())

    def _read(self, fresh: list[Running]) -> Iterator[BatchPiece]:
        """Prefill: several prompts in a pass, as many tokens as its workspace allows."""
        while reading := [one for one in fresh if one.unread and not one.sequence.cancelled]:
            work, room = list[tuple[Running, int]](), self._passes.max_chunk(sum(one.unread for one in reading))
            if self._loaded.shape.encoder_layers:  # whose passes are not the decoder's
                reading = [one for one in reading if bool(one.sequence.computed) == bool(reading[0].sequence.computed)]
            for one in reading:
                if not room or (work and one.unread > room and not self._loaded.sizes.carried):
                    break
                count = self._passes.next_count(one.sequence, one.unread, room)
                work.append((one, count))
                room -= count
            yield from self._computed("prefill", work)

    def _decode(self, running: list[Running]) -> Iterator[BatchPiece]:
        """The next token of every sequence, as many in a pass as its workspace allows."""
        most = self._passes.chunk
        for batch in self._groups.batches(running):
            for at in range(0, len(batch), most):
                yield from self._computed("decode", [(one, 1) for one in batch[at : at + most]])

    def _dividing(self, scheduler: Scheduler | None, size: int, *, pipelined: bool) -> BatchGroups:
        shape, expected = decoder_shape(self._loaded.shape), self._parts.prediction.predictor_host.expected
        return BatchGroups(scheduler, size, shape, expected, self.regrouped, pipelined=pipelined)

    def _computed(self, phase: Phase, work: list[tuple[Running, int]]) -> Iterator[BatchPiece]:
        """One pass over the next tokens, so many of each; fewer where settings that came since leave less memory."""
        total = work[0][0].sequence.prompt if len(work) == 1 else 0
        before = [one.sequence.computed for one, _ in work]
        tokens, step = self._passes.run(phase, *[(one.sequence, count) for one, count in work], total=total)
        counts = [one.sequence.computed - held for (one, _), held in zip(work, before, strict=True)]
        if self._groups.follows and (routed := self._parts.recorder.routed):
            for (one, _), row in zip(work, accumulate(counts), strict=True):
                one.path = np.array([layer[row - 1] for layer in routed], np.int16)
        for (one, _), drawn, count in zip(work, tokens, counts, strict=True):
            if not count:
                continue
            one.active.answer.count(step)
            sequence = one.sequence
            if phase == "prefill":
                if sequence.kept:
                    sequence.remember(sequence.kv.memory.checkpoint(sequence.kv))
                done, cached = sequence.computed, sequence.cached
                yield BatchPiece(one.key, Piece("prefill", done=done, total=sequence.prompt, cached=cached, step=step))
            for piece in one.active.answer.taken(drawn):
                yield BatchPiece(one.key, piece)
