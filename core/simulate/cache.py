"""The engine's expert cache without its bytes: the same eviction policies over ids, all layers and cache sizes at once.

A lane is one pool of slots: one layer of one of several caches that differ in size or, with scope "global", a whole
cache. Lanes never influence each other. A pass does what `core.cache.expert_cache` and `core.runtime.moe_step` do: hits
are used first, in the order in which the router named them; then each missing expert, one after the other, gets a free
slot, or the slot of the expert that the policy evicts among those that the pass does not need.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from core.errors import SettingError
from core.policy.allocation.slot_allocation import crowded
from core.policy.allocation.slots import shares, waves
from core.policy.eviction import GONE, Eviction, ExpertIndex, victim
from core.policy.hints import Hints

Ints = npt.NDArray[np.int64]
NOBODY: Ints = np.zeros(0, np.int64)


class Cache:
    """`slots[c]` = slots of cache copy c: one number, which the layers share evenly, or one number for each layer. Ids
    are those of `core.policy.eviction.ExpertIndex`. Experts pinned by `hints` are resident from the start and never
    evicted."""

    def __init__(
        self,
        make: Callable[[ExpertIndex], Eviction],
        layers: int,
        experts: int,
        top_k: int,
        scope: str,
        slots: Sequence[int | Sequence[int]],
        hints: Hints | None = None,
    ) -> None:
        """Raises SettingError when a lane has fewer slots than a token needs in a layer."""
        self.expert_index = ExpertIndex(layers, experts, len(slots), hints)
        self.policy = make(self.expert_index)
        pools = layers if scope == "layer" else 1
        self.scope, self.lanes, self.width = scope, pools * len(slots), self.expert_index.size // (pools * len(slots))
        each = [shares(min(n, layers * experts), pools) if isinstance(n, int) else list(n) for n in slots]
        for sizes in each:
            if min(sizes) < top_k:
                least = f"{layers} layers with slots of their own need" if pools > 1 else "a cache needs"
                raise SettingError(
                    f"{sum(sizes)} slots are too few: a token needs {top_k} experts in a layer, so "
                    f"{least} at least {top_k * pools}."
                )
            if problem := crowded(
                np.flatnonzero(self.expert_index.hints.pinned).tolist(), sizes, layers * experts, top_k
            ):
                raise SettingError(problem)
        self.capacity: Ints = np.concatenate(each)
        self._pinned: Ints = np.flatnonzero(self.expert_index.pinned)
        self._stays = frozenset(self._pinned.tolist())
        self.room: Ints = self.capacity - np.bincount(self._pinned // self.width, minlength=self.lanes)
        self.free = self.capacity.copy()
        self._room = True  # some lane has free slots
        self._tick = 0
        self._start: Ints = np.arange(self.lanes) * self.width
        self._all = slice(0, self.expert_index.size)
        self.missing: npt.NDArray[np.bool_] = np.zeros((self.lanes, top_k), np.bool_)  # of the last `together`
        self.gone = NOBODY  # ids that the last `together` evicted, each lane's in the order of eviction
        for eid in self._pinned.tolist():
            self._admit(eid)

    def fill(self) -> None:
        """Fills the free slots with experts, each layer's most used ones first, as the engine does after a load."""
        if not self.policy.retains:
            return
        expert_index = self.expert_index
        order, total = expert_index.hints.filling(), expert_index.layers * expert_index.experts
        for eid in (copy * total + eid for copy in range(expert_index.copies) for eid in order):
            if self.free[eid // self.width] and self.policy.score[eid] == GONE:
                self._admit(eid)
        self._room = bool(self.free.any())

    def _admit(self, eid: int) -> None:
        """Puts an expert into a free slot, before the first pass."""
        self.free[eid // self.width] -= 1
        self._tick += 1
        self.policy.admitted(eid, self._tick, 0)

    def together(self, ids: Ints, now: int, layer: Any) -> npt.NDArray[np.intp]:
        """One token: every lane requests its row of `ids` [lanes, k], all distinct -> misses [lanes].

        `layer`: the layer of every id of the expert index [size], or one number for all when each lane is a whole
        cache.
        """
        policy, k = self.policy, ids.shape[1]
        held = policy.score.take(ids)
        self.missing = missing = held == GONE
        misses: npt.NDArray[np.intp] = np.add.reduce(missing, 1)
        ticks = missing * k
        ticks += np.arange(self._tick + 1, self._tick + 1 + k)
        self._tick += 2 * k
        self.gone = NOBODY
        if misses.any():
            need = misses
            if self._room:
                need = np.maximum(misses - self.free, 0)
                self.free = np.maximum(self.free - misses, 0)
                self._room = bool(self.free.any())
            if need.any():
                self._evict(ids, held, need, now, layer)
            new = missing.ravel().nonzero()[0]
            policy.admitted(ids.take(new), ticks.take(new), now)
        policy.used(ids, ticks, now)
        if not policy.retains:
            leave = ~self.expert_index.pinned[ids]
            policy.left(ids[leave])
            self.free = self.free + leave.sum(1)
            self._room = True
        return misses

    def _evict(self, ids: Ints, held: npt.NDArray[Any], need: Ints, now: int, layer: Any) -> None:
        """Evicts `need` [lanes] experts, none of `ids`. Lanes are sorted by `need`, largest first, so that every round
        works on a shorter table."""
        policy, start, pinned = self.policy, self._start, self._pinned
        scores = policy.scores(self._all, now, layer)
        stay = scores[pinned]
        scores[ids] = scores[pinned] = GONE
        order = np.argsort(-need, kind="stable")
        rounds = (self.lanes - np.bincount(need).cumsum()).tolist()  # lanes that need more than 0, 1, 2 ... experts
        lanes = order[: rounds[0]]
        table = scores.reshape(self.lanes, self.width).take(lanes, 0)
        if not policy.time_dependent:
            scores[ids], scores[pinned] = held, stay  # undo: it is the policy's own array
        flat, left = table.reshape(-1), []
        for count in rounds[:-1]:
            at = table[:count].argmin(1)
            at += start[:count]
            flat[at] = GONE
            left.append(at)
        gone = np.concatenate(left)  # places in the table
        gone += (start.take(lanes) - start[: len(lanes)]).take(gone // self.width)
        policy.left(gone)
        self.gone = gone

    def alone(self, lane: int, wanted: Sequence[int], now: int, layer: int) -> int:
        """One lane requests any number of distinct experts in one pass, in waves if they do not fit -> number
        of misses."""
        policy, capacity = self.policy, max(1, int(self.room[lane]))
        groups = waves(wanted, capacity, lambda eid: bool(policy.score[eid] != GONE))
        leased: set[int] = set()
        misses = self._acquire(lane, groups[0], leased, now, layer)
        for i, group in enumerate(groups):
            last, room = i + 1 == len(groups), capacity > 1
            if not last and room:
                misses += self._acquire(lane, groups[i + 1], leased, now, layer)
            self._release(lane, group, leased)
            if not last and not room:
                misses += self._acquire(lane, groups[i + 1], leased, now, layer)
        self._room = bool(self.free.any())
        return misses

    def _acquire(self, lane: int, wanted: Sequence[int], leased: set[int], now: int, layer: int) -> int:
        policy = self.policy
        leased.update(wanted)
        missing = [eid for eid in wanted if policy.score[eid] == GONE]
        for eid in wanted:
            if eid not in missing:
                self._tick += 1
                policy.used(eid, self._tick, now)
        part = slice(lane * self.width, (lane + 1) * self.width)
        for eid in missing:
            if self.free[lane]:
                self.free[lane] -= 1
            else:
                gone = victim(policy, part, now, layer, leased, self._stays)
                assert gone is not None, "a pass needs more slots than its lane has"
                policy.left(gone)
            self._tick += 1
            policy.admitted(eid, self._tick, now)
            policy.used(eid, self._tick, now)
        return len(missing)

    def _release(self, lane: int, wanted: Sequence[int], leased: set[int]) -> None:
        leased.difference_update(wanted)
        if not self.policy.retains:
            leave = [eid for eid in wanted if eid not in self._stays]
            for eid in leave:
                self.policy.left(eid)
            self.free[lane] += len(leave)
