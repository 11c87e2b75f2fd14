"""Answers many prompts together: sequences join when there is room for their KV, and leave when they have ended.

New prompts are read several at a time; then each pass computes the next token of every sequence. An expert that several
of them need is fetched once, and computed once for all of their tokens.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass

from core.errors import ContextError, ModelError
from core.quality.meter import Meter
from core.runtime.kv_pool import KVPool
from core.runtime.pipeline import Pipeline, Stopped
from core.session.answer import AnswerBuilder
from core.session.constraint import Constraints
from core.session.loading import LoadedModel
from core.session.logprobs import Logprobs
from core.session.passes import Passes
from core.session.prompt import Ids
from core.session.sampler import Sampler
from core.session.sequence import Sequence, Stop
from core.session.settings_controller import EngineParts
from core.settings.sampling import Sampling
from core.types import Chat, Phase, Piece

BATCH = 16  # sequences at a time, where nothing else is said
JOIN = 4  # new sequences join when a quarter of the places is free


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """A prompt to answer; `key` names it in what comes back."""

    key: Hashable
    messages: Chat | str | Ids
    sampling: Sampling


@dataclass(frozen=True, slots=True)
class BatchPiece:
    """A piece of the answer to the request `key`; of none (None) when a pass has read prompts. `error`: why it has no
    answer, in the user's words; then nothing else comes of it. Pieces of one pass have the same step record."""

    key: Hashable | None
    piece: Piece | None = None
    error: str = ""


@dataclass(slots=True)
class Running:
    """A request that is being answered."""

    key: Hashable
    sequence: Sequence
    answer: AnswerBuilder
    seed: int


class Batching:
    """For one model. Requested settings are applied before every pass."""

    def __init__(
        self,
        loaded: LoadedModel,
        pipeline: Pipeline,
        pool: KVPool,
        meter: Meter,
        passes: Passes,
        parts: EngineParts,
        number: Callable[[], int],
    ) -> None:
        """`number()` is the next request's."""
        self._loaded, self._pipeline, self._pool, self._meter = loaded, pipeline, pool, meter
        self._passes, self._parts, self._number = passes, parts, number
        self._constraints = Constraints(loaded.prompt)

    def run(self, requests: Iterable[BatchRequest], limit: int, cancel: threading.Event) -> Iterator[BatchPiece]:
        """Answer all requests, at most `limit` at a time; the next is asked for when there is room. When `cancel` is
        set, the pass under way is broken off and what is running ends as cancelled. Nothing is kept of any."""
        source, waiting = iter(requests), list[Running]()
        running: list[Running] = []
        asked: BatchRequest | None = next(source, None)
        places = limit  # sequences that there is room for
        try:
            while (running or asked is not None) and not cancel.is_set():
                # a pass over prompts needs nearly all experts, however short they are: several join at once
                together = not running or len(running) <= places - max(1, places // JOIN)
                while asked is not None and together and len(running) + len(waiting) < limit:
                    try:
                        fresh = self._joined(asked, cancel)
                    except (ContextError, ModelError) as error:
                        yield BatchPiece(asked.key, error=str(error))
                        asked = next(source, None)
                        continue
                    if fresh is None:
                        places = len(running) + len(waiting)
                        break
                    waiting.append(fresh)
                    asked = next(source, None)
                with suppress(Stopped):
                    yield from self._read(waiting)
                    running += waiting
                    waiting.clear()
                    yield from self._ended(running)
                    if running:
                        yield from self._decode(running)
                        yield from self._ended(running)
            for one in (*running, *waiting):
                yield self._end(one)
        finally:
            self._pipeline.end()
            self._pool.clear()

    # ------------------------------------------------------------------ joining and leaving

    def _joined(self, request: BatchRequest, cancel: threading.Event) -> Running | None:
        """A sequence for the request; None while there is no room for its KV. Raises ContextError or ModelError."""
        loaded, sampling = self._loaded, request.sampling.drawn()
        ids, context = loaded.prompt.encode(request.messages, loaded.plan.context), loaded.plan.context
        room = context - len(ids)
        limit = min(sampling.max_new_tokens, room)
        constraint = self._constraints.of(sampling, len(ids)) if sampling.schema or sampling.grammar else None
        kv = self._pool.take(len(ids) + limit)
        if kv is None:
            return None
        draw = Sampler(sampling, loaded.device, len(ids), constraint)
        logprobs = None if sampling.logprobs is None else Logprobs(draw, loaded.prompt.tokenizer, sampling.logprobs)
        stop = Stop(loaded.prompt.ends, limit, sampling.max_new_tokens > room, cancel)
        sequence = Sequence(self._number(), list(ids), kv, logprobs or draw, stop, self._meter.begin())
        answer = AnswerBuilder(loaded.prompt.tokenizer, sequence, time.perf_counter(), sampling.stop, logprobs)
        return Running(request.key, sequence, answer, sampling.seed)

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
        self._pool.give_back(sequence.kv)
        return BatchPiece(one.key, Piece("end", text=answer.rest(), step=answer.last_step, stats=stats))

    # ------------------------------------------------------------------ passes

    def _read(self, fresh: list[Running]) -> Iterator[BatchPiece]:
        """Prefill: several prompts in a pass, as many tokens as its workspace allows."""
        while reading := [one for one in fresh if one.sequence.computed < one.sequence.prompt]:
            work, room = list[tuple[Running, int]](), self._loaded.sizes.chunk
            for one in reading:
                left = one.sequence.prompt - one.sequence.computed
                if not room or (work and left > room and not self._loaded.sizes.carried):
                    break
                count = min(left, room)
                work.append((one, count))
                room -= count
            yield from self._computed("prefill", work)

    def _decode(self, running: list[Running]) -> Iterator[BatchPiece]:
        """The next token of every sequence, as many in a pass as its workspace allows."""
        most = max(1, self._loaded.sizes.chunk)
        for at in range(0, len(running), most):
            yield from self._computed("decode", [(one, 1) for one in running[at : at + most]])

    def _computed(self, phase: Phase, work: list[tuple[Running, int]]) -> Iterator[BatchPiece]:
        """One pass over the next tokens, so many of each."""
        tokens, step = self._passes.run(phase, *[(one.sequence, count) for one, count in work])
        if phase == "prefill":
            yield BatchPiece(None, Piece("prefill", done=step.tokens, total=step.tokens, step=step))
        for (one, _), token in zip(work, tokens, strict=True):
            one.answer.count(step)
            if token is not None and one.answer.take(token):
                yield BatchPiece(one.key, one.answer.piece())
