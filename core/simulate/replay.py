"""Replays a trace through caches: every pass in order, every layer, every cache size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from core.policy.eviction import NEVER, Belady, Eviction, ExpertIndex
from core.policy.hints import Hints
from core.profile.trace import Chunk, Trace
from core.simulate.blocks import BLOCKS, block_of
from core.simulate.cache import Cache

Ints = npt.NDArray[np.int64]
BLOCK = 256  # tokens whose ids are widened at once: few enough for the processor's cache


@dataclass(slots=True)
class Tally:
    """Counts per cache copy and layer. Requests: distinct experts of a layer in a pass."""

    requests: Ints  # [2, copies, layers]; 0 = prefill, 1 = decode
    misses: Ints  # [2, copies, layers]
    by_misses: Ints  # [copies, layers, k + 1] decoded tokens that missed 0 ... k experts
    first: Ints  # [2, layers] first requests of an expert in the trace
    by_rank: Ints  # [copies, layers, k] misses of decoded tokens by the rank of the expert in the router's order
    by_block: Ints  # [BLOCKS, copies, layers, k + 1] as `by_misses`, of each part of the trace (core.simulate.blocks)
    ranked: int = 0  # decoded tokens that `by_rank` is of: all whose experts are distinct

    @classmethod
    def empty(cls, copies: int, layers: int, k: int) -> Tally:
        """All counts zero."""
        both = (2, copies, layers)
        return cls(
            np.zeros(both, np.int64),
            np.zeros(both, np.int64),
            np.zeros((copies, layers, k + 1), np.int64),
            np.zeros((2, layers), np.int64),
            np.zeros((copies, layers, k), np.int64),
            np.zeros((BLOCKS, copies, layers, k + 1), np.int64),
        )


@dataclass(slots=True)
class Replay:
    """One policy over one trace, for several caches at once; `slots` and `transit` as in Cache. `start`: "empty", or
    "filled" as the engine's cache is after a load."""

    trace: Trace
    make: Callable[[ExpertIndex], Eviction]
    slots: Sequence[int | Sequence[int]]
    scope: str = "layer"
    start: str = "empty"
    hints: Hints | None = None
    transit: int = 0
    cache: Cache = field(init=False)
    tally: Tally = field(init=False)
    _now: int = 0  # tokens so far
    _asked: npt.NDArray[np.bool_] = field(init=False)

    def __post_init__(self) -> None:
        trace, copies = self.trace, len(self.slots)
        self.cache = Cache(
            self.make, trace.layers, trace.experts, trace.top_k, self.scope, self.slots, self.hints, self.transit
        )
        self.tally = Tally.empty(copies, trace.layers, trace.top_k)
        self._asked = np.zeros(trace.layers * trace.experts, np.bool_)
        if self.start == "filled":
            self.cache.fill()

    def run(self) -> Tally:
        """Replays the whole trace."""
        future = upcoming(self.trace) if isinstance(self.cache.policy, Belady) else None
        at = 0
        for chunk in self.trace.chunks():
            _, misses = self.feed(chunk, None if future is None else future[at : at + len(chunk.ids)])
            self._count_blocks(chunk, misses, at)
            at += len(chunk.ids)
        return self.tally

    def feed(self, chunk: Chunk, future: npt.NDArray[Any] | None = None) -> tuple[Ints, Ints]:
        """Replays the next passes -> requests, misses, each [passes, copies * layers]. `future` [n, layers, k] = the
        pass of the next use of each id, for Belady alone."""
        expert_index = self.cache.expert_index
        ordered = np.sort(chunk.ids, 2)
        plain = (ordered[..., 1:] != ordered[..., :-1]).all((1, 2)).tolist()  # no id is repeated
        misses = np.zeros((len(chunk.sizes), expert_index.copies * expert_index.layers), np.int64)
        requests = np.full(misses.shape, self.trace.top_k, np.int64)
        at = first = end = 0
        for i, size in enumerate(chunk.sizes.tolist()):
            self._now += size
            if at + size > end:  # widen the ids of some tokens at once
                first, end = at, at + max(size, BLOCK)
                ids = self._everywhere(chunk.ids[first:end])
            rows = ids[at - first : at - first + size]
            if future is not None:
                self._foresee(rows, future[at : at + size])
            if size == 1 and plain[at]:
                self._token(rows[0], misses[i], bool(chunk.decode[i]))
            else:
                self._pass(rows, misses[i], requests[i])
            at += size
        self._count(chunk, requests, misses)
        if not self._asked.all():
            self._note_first(chunk)
        return requests, misses

    def _everywhere(self, ids: npt.NDArray[Any]) -> Ints:
        """[n, layers, k] expert ids -> [n, copies * layers, k] ids of the expert index."""
        expert_index = self.cache.expert_index
        base = np.arange(expert_index.copies * expert_index.layers) * expert_index.experts
        return np.tile(ids.astype(np.int64), (1, expert_index.copies, 1)) + base[:, None]

    def _token(self, ids: Ints, misses: Ints, decode: bool) -> None:
        cache, expert_index, by_rank = self.cache, self.cache.expert_index, self.tally.by_rank
        self.tally.ranked += decode
        if cache.scope == "layer":
            misses[:] = cache.together(ids, self._now, expert_index.layer_of)
            by_rank += decode * cache.missing.reshape(by_rank.shape)
            return
        for layer in range(expert_index.layers):
            misses[layer :: expert_index.layers] = cache.together(ids[layer :: expert_index.layers], self._now, layer)
            by_rank[:, layer] += decode * cache.missing

    def _pass(self, ids: Ints, misses: Ints, requests: Ints) -> None:
        """Many tokens at once, or one with repeated ids: the number of requests differs between layers."""
        cache, expert_index = self.cache, self.cache.expert_index
        single = len(ids) == 1
        for layer in range(expert_index.layers):
            for row in range(layer, len(misses), expert_index.layers):
                if single:
                    wanted = list(dict.fromkeys(ids[0, row].tolist()))
                else:
                    distinct, tokens = np.unique(ids[:, row], return_counts=True)
                    wanted = distinct.tolist()
                    cache.policy.chosen(distinct, tokens)
                requests[row] = len(wanted)
                misses[row] = cache.alone(wanted[0] // cache.width, wanted, self._now, layer)

    def _foresee(self, ids: Ints, future: npt.NDArray[Any]) -> None:
        assert isinstance(self.cache.policy, Belady)
        self.cache.policy.foresee(ids, np.tile(future, (1, self.cache.expert_index.copies, 1)))

    def _count(self, chunk: Chunk, requests: Ints, misses: Ints) -> None:
        expert_index, tally = self.cache.expert_index, self.tally
        shape = (-1, expert_index.copies, expert_index.layers)
        requests, misses = requests.reshape(shape), misses.reshape(shape)
        for phase in (0, 1):
            of = chunk.decode == bool(phase)
            tally.requests[phase] += requests[of].sum(0)
            tally.misses[phase] += misses[of].sum(0)
        decode = misses[chunk.decode & (chunk.sizes == 1)]
        for count in range(tally.by_misses.shape[2]):
            tally.by_misses[..., count] += (decode == count).sum(0)

    def _count_blocks(self, chunk: Chunk, misses: Ints, first: int) -> None:
        """`misses` [passes, copies * layers] of a chunk whose first token is number `first` of the trace."""
        by_block, decode = self.tally.by_block, chunk.decode & (chunk.sizes == 1)
        block = block_of(first + (chunk.sizes.cumsum() - chunk.sizes)[decode].astype(np.int64), self.trace.tokens)
        rows = misses[decode].reshape(-1, *by_block.shape[1:3])
        for number in np.unique(block):
            of = rows[block == number]
            for count in range(by_block.shape[3]):
                by_block[number, ..., count] += (of == count).sum(0)

    def _note_first(self, chunk: Chunk) -> None:
        """Counts the first requests of each expert: no cache that starts empty can hit them."""
        ids = chunk.ids + np.arange(self.trace.layers)[:, None] * self.trace.experts
        flat = ids.reshape(-1)
        fresh = np.flatnonzero(~self._asked.take(flat))[::-1]
        first = np.full(self._asked.size, -1)
        first[flat[fresh]] = fresh  # the last write wins, so the first request in the trace
        eids = np.flatnonzero(first >= 0)
        phase = np.repeat(chunk.decode, chunk.sizes)[first[eids] // ids[0].size].astype(np.int64)
        np.add.at(self.tally.first, (phase, eids // self.trace.experts), 1)
        self._asked[eids] = True


def upcoming(trace: Trace) -> npt.NDArray[np.int32]:
    """[tokens, layers, k] the pass in which each requested expert is requested next; NEVER = not again. Passes count
    from 1, as in Replay."""
    chunks = [(chunk.ids, chunk.sizes) for chunk in trace.chunks()]
    found = np.empty((trace.tokens, trace.layers, trace.top_k), np.int32)
    following = np.full(trace.layers * trace.experts, NEVER, np.int32)
    base = np.arange(trace.layers)[:, None] * trace.experts
    now, at = sum(len(sizes) for _, sizes in chunks), trace.tokens
    for ids, sizes in reversed(chunks):
        end = len(ids)
        for size in reversed(sizes.tolist()):
            asked = ids[end - size : end] + base
            found[at - size : at] = following[asked]
            following[asked] = now
            now, at, end = now - 1, at - size, end - size
    return found
