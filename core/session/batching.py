"""Answers many prompts together: sequences join when there is room for their KV, and leave when they have ended.

New prompts are read several at a time; then each pass computes the next token of every sequence. An expert that several
of them need is fetched once, and computed once for all of their tokens.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from core.errors import ContextError, MoestroError, PromptError
from core.hf.text_to_text import decoder_shape
from core.policy.batching import Scheduler, in_order, union_size
from core.quality.meter import Meter
from core.runtime.kv_pool import KVPool
from core.runtime.pipeline import Pipeline, Stopped
from core.session.answer import AnswerBuilder
from core.session.batch_request import BATCH, BatchPiece, BatchRequest, Regrouped
from core.session.constraint import Constraints
from core.session.kept import Start
from core.session.loading import LoadedModel
from core.session.logprobs import Logprobs
from core.session.passes import Passes
from core.session.sampler import Sampler
from core.session.sequence import Sequence, Stop
from core.session.settings_controller import EngineParts, SettingsController
from core.types import Phase, Piece

Ids = npt.NDArray[np.int16]
SCHEDULED = 1000  # times of regrouping that are kept
JOIN = 4  # new sequences join when a quarter of the places is free


@dataclass(slots=True)
class Running:
    """A request that is being answered."""

    key: Hashable
    sequence: Sequence
    answer: AnswerBuilder
    seed: int
    path: Ids | None = None  # [L, k] the experts of its newest token, in the layers that decode; None before its first

    @property
    def unread(self) -> int:
        """Tokens to read before the next one can be drawn: of the prompt, or of all when it is read again."""
        sequence = self.sequence
        total = len(sequence.ids) - 1 if sequence.drawn else sequence.prompt
        return total - sequence.computed


class Either:
    """Set when any of some events is."""

    def __init__(self, *events: threading.Event | None) -> None:
        self._events = [one for one in events if one is not None]

    def is_set(self) -> bool:
        """Whether one of them is."""
        return any(one.is_set() for one in self._events)


class Batching:
    """For one model. Requested settings are applied before every pass."""

    def __init__(
        self,
        loaded: LoadedModel,
        pipeline: Pipeline,
        pool: KVPool,
        meter: Meter,
        passes: Passes,
        controller: SettingsController,
        parts: EngineParts,
        number: Callable[[], int],
    ) -> None:
        """`number()` is the next request's."""
        self._loaded, self._pipeline, self._pool, self._meter = loaded, pipeline, pool, meter
        self._passes, self._controller, self._parts, self._number = passes, controller, parts, number
        self._constraints, self._by_row, self._size = Constraints(loaded.prompt), False, BATCH
        self._scheduler: Scheduler | None = None
        self.regrouped: deque[Regrouped] = deque(maxlen=SCHEDULED)  # the last times

    def run(
        self,
        requests: Iterable[BatchRequest | None],
        limit: int,
        cancel: threading.Event,
        *,
        by_row: bool = False,
        scheduler: Scheduler | None = None,
    ) -> Iterator[BatchPiece]:
        """Answer all requests, at most `limit` at a time; the next is asked for when there is room, and None means that
        there is none now: it is asked again after each pass, until nothing runs. When `cancel` is set, the pass under
        way is broken off and what is running ends as cancelled. `by_row`: also a token that is computed alone is
        computed as it would be beside others. With a `scheduler` twice as many are at work, in two batches that it
        chooses anew for every token."""
        self._by_row, self._size = by_row, limit
        self.regrouped.clear()
        self._scheduler, limit = scheduler, limit if scheduler is None else 2 * limit
        source, running, places = iter(requests), list[Running](), limit
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
                        fresh = self._joined(asked, cancel)
                    except MoestroError as error:
                        too_long = isinstance(error, ContextError)
                        refused = too_long or isinstance(error, PromptError)
                        yield BatchPiece(asked.key, None, str(error), refused, too_long)
                        asked = None
                        continue
                    if fresh is None:
                        places = len(running)
                        break
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
            self._pipeline.end()
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

    def _joined(self, request: BatchRequest, cancel: threading.Event) -> Running | None:
        """A sequence for the request; None while there is no room for its KV. Raises MoestroError."""
        loaded, sampling = self._loaded, request.sampling.drawn()
        ids, context = loaded.prompt.encode(request.messages, loaded.plan.context), loaded.plan.context
        room = context - len(ids)
        limit = min(sampling.max_new_tokens, room)
        constraint = self._constraints.of(sampling, len(ids)) if sampling.schema or sampling.grammar else None
        chat = request.reuse and self._pool.has_chat_room
        start = self._chat(ids) if chat else self._pool.take(len(ids) + limit)
        if start is None:
            return None
        draw = Sampler(sampling, loaded.device, len(ids), constraint)
        logprobs = None if sampling.logprobs is None else Logprobs(draw, loaded.prompt.tokenizer, sampling.logprobs)
        stop = Stop(loaded.prompt.ends, limit, sampling.max_new_tokens > room, Either(request.cancel, cancel))
        kv, begun = (start.kv, start.moment) if isinstance(start, Start) else (start, None)
        sequence = Sequence(
            self._number(), list(ids), kv, logprobs or draw, stop, self._meter.begin(), kept=chat, begun=begun
        )
        sequence.reading = request.reading
        answer = AnswerBuilder(loaded.prompt.tokenizer, sequence, time.perf_counter(), sampling.stop, logprobs)
        return Running(request.key, sequence, answer, sampling.seed)

    def _chat(self, ids: list[int]) -> Start:
        """The chats' memory, for the one whose KV outlives its answer."""
        self._pool.chatting = True
        return self._parts.kept.begin(ids, self._parts.kept.manner(self._controller.wanted))

    def _ended(self, running: list[Running]) -> Iterator[BatchPiece]:
        """Those that are over leave, and give their room to others."""
        for one in [one for one in running if one.sequence.over]:
            running.remove(one)
            yield self._end(one)

    def _end(self, one: Running) -> BatchPiece:
        sequence, answer, plan = one.sequence, one.answer, self._loaded.plan
        given, drawn = sequence.ids[: sequence.prompt], sequence.ids[sequence.prompt :]
        stats = answer.stats(
            self._parts.ledger.memory(self._loaded.store.bytes, self._loaded.store.unpinned_bytes),
            one.seed,
            self._meter.end(sequence.sample, given, drawn, answer.steps),
            plan.closeness,
            plan.weights,
        )
        self._leave(sequence)
        return BatchPiece(one.key, Piece("end", text=answer.rest(), step=answer.last_step, stats=stats))

    def _leave(self, sequence: Sequence) -> None:
        if sequence.kept:
            self._parts.kept.end(sequence.ids, sequence.prompt, sequence.kv, sequence.moments)
            self._pool.chatting = False
        else:
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
            work, room = list[tuple[Running, int]](), self._passes.chunk
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
        for group in self._groups(running):
            for at in range(0, len(group), most):
                yield from self._computed("decode", [(one, 1) for one in group[at : at + most]])

    def _groups(self, running: list[Running]) -> list[list[Running]]:
        """The batches that are computed one after the other. A sequence is expected to need what the predictor says of
        its next token, or else the experts of its newest one again."""
        if self._scheduler is None or not running:
            return [running]
        began_s, shape = time.perf_counter(), decoder_shape(self._loaded.shape)
        paths = np.zeros((len(running), shape.layers, shape.experts), np.bool_)
        for at, one in enumerate(running):
            expected = self._parts.predictor_host.expected(one.sequence.request)
            if expected is not None:
                paths[at] = expected.reshape(shape.layers, shape.experts)
            elif one.path is not None:
                np.put_along_axis(paths[at], one.path.astype(np.int64), True, 1)
        needed = paths.reshape(len(running), -1)
        groups = self._scheduler.regroup(needed, self._size)
        took_ms, cells = (time.perf_counter() - began_s) * 1e3, shape.layers * len(groups)
        arrival = union_size(needed, in_order(len(running), self._size)) / cells
        self.regrouped.append(Regrouped(took_ms, arrival, union_size(needed, groups) / cells))
        return [[running[at] for at in group] for group in groups]

    def _computed(self, phase: Phase, work: list[tuple[Running, int]]) -> Iterator[BatchPiece]:
        """One pass over the next tokens, so many of each."""
        total = work[0][0].sequence.prompt if len(work) == 1 else 0
        tokens, step = self._passes.run(
            phase, *[(one.sequence, count) for one, count in work], total=total, by_row=self._by_row
        )
        if self._scheduler is not None and (routed := self._parts.recorder.routed):
            for (one, _), row in zip(work, accumulate(count for _, count in work), strict=True):
                one.path = np.array([layer[row - 1] for layer in routed], np.int16)
        for (one, _), token in zip(work, tokens, strict=True):
            one.answer.count(step)
            sequence = one.sequence
            if phase == "prefill":
                if sequence.kept:
                    sequence.remember(sequence.kv.memory.moment(sequence.kv))
                done, cached = sequence.computed, sequence.cached
                yield BatchPiece(one.key, Piece("prefill", done=done, total=sequence.prompt, cached=cached, step=step))
            if token is not None and one.answer.take(token):
                yield BatchPiece(one.key, one.answer.piece())
