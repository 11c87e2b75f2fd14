"""`core.cache.core` in arrays: the same requests, hits and evictions, for all layers and cache sizes at once.

A lane is one pool of slots: one layer of one of several caches that differ in size or, with scope "global", a whole
cache. Lanes never influence each other. A request does what the engine's does: hits are used first, in the order in
which the router named them; then each missing expert, one after the other, gets a free slot, or the slot of the expert
that the policy evicts among those that the pass does not need. With transit slots, whoever is worth least leaves when
the layer is done. The scalar core is what this is tested against."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from core.cache.lease import leases
from core.errors import SettingError
from core.policy.allocation.slot_allocation import pin_conflict
from core.policy.allocation.slots import shares, waves
from core.policy.eviction import GONE, Eviction, ExpertIndex
from core.policy.hints import Hints

Ints = npt.NDArray[np.int64]
NOBODY: Ints = np.zeros(0, np.int64)


class Cache:
    """`slots[c]` = slots of cache copy c: one number, which the layers share evenly, or one number for each layer; each
    copy has `transit` more, which all its layers share. Ids are those of `core.policy.eviction.ExpertIndex`. Experts
    pinned by `hints` are resident from the start and never evicted."""

    def __init__(
        self,
        make: Callable[[ExpertIndex], Eviction],
        layers: int,
        experts: int,
        top_k: int,
        scope: str,
        slots: Sequence[int | Sequence[int]],
        hints: Hints | None = None,
        transit: int = 0,
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
            if problem := pin_conflict(
                np.flatnonzero(self.expert_index.hints.pinned).tolist(), sizes, layers * experts, top_k
            ):
                raise SettingError(problem)
        self.capacity: Ints = np.concatenate(each)
        self._stays: npt.NDArray[np.bool_] = self.expert_index.pinned.reshape(self.lanes, self.width)
        self._has_pins = bool(self._stays.any())
        self.room: Ints = self.capacity - self._stays.sum(1)
        self.free = self.capacity.copy()  # negative: transit slots that the lane is lent
        self.transit = transit
        self._some_free = True
        self._tick = 0
        self._start: Ints = np.arange(self.lanes) * self.width
        self.missing: npt.NDArray[np.bool_] = np.zeros((self.lanes, top_k), np.bool_)  # of the last `together`
        self.gone = NOBODY  # ids that the last `together` evicted, each lane's in the order of eviction
        for eid in np.flatnonzero(self.expert_index.pinned).tolist():
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
        self._some_free = bool(self.free.any())

    def _admit(self, eid: int) -> None:
        """Puts an expert into a free slot, before the first pass."""
        self.free[eid // self.width] -= 1
        self._tick += 1
        self.policy.admitted(eid, self._tick, 0)

    def together(self, ids: Ints, now: int, layer: Any) -> npt.NDArray[np.intp]:
        """One token: every lane requests its row of `ids` [lanes, k], all distinct -> misses [lanes].

        `layer`: the layer of every id of the expert index [size], or one number for all when each lane is a whole
        cache."""
        misses = self._request(0, ids, ids, now, layer)
        if not self.policy.retains:
            leave = ~self.expert_index.pinned[ids]
            self.policy.left(ids[leave])
            self.free = self.free + leave.sum(1)
            self._some_free = True
        if self.transit:
            self._take_back(0, self.lanes, now, layer)
        return misses

    def alone(self, lane: int, wanted: Sequence[int], now: int, layer: int) -> int:
        """One lane requests any number of distinct experts in one pass, in waves if they do not fit -> number
        of misses."""
        leased, misses = list[int](), 0

        def acquire(group: Sequence[int]) -> Ints:
            nonlocal misses
            leased.extend(group)
            ids: Ints = np.array([group])
            misses += int(self._request(lane, ids, np.array([leased]), now, layer)[0])
            return ids

        def release(ids: Ints) -> None:
            del leased[: ids.size]
            if not self.policy.retains:
                leave = ids[~self.expert_index.pinned[ids]]
                self.policy.left(leave)
                self.free[lane] += leave.size
            if self.transit and not leased:
                self._take_back(lane, 1, now, layer)

        score, room = self.policy.score, max(1, int(self.room[lane]))
        groups = waves(wanted, room, lambda eid: bool(score[eid] == GONE))
        for _ in leases(groups, room, acquire, release):
            pass
        self._some_free = bool(self.free.any())
        return misses

    def _request(self, first: int, ids: Ints, leased: Ints, now: int, layer: Any) -> npt.NDArray[np.intp]:
        """The lanes from `first` on request their rows of `ids` [n, k], all distinct, while `leased` [n, at least k],
        which include them, cannot be evicted -> misses [n]."""
        policy, k, lanes = self.policy, ids.shape[1], slice(first, first + len(ids))
        self.missing = missing = policy.score.take(ids) == GONE
        misses: npt.NDArray[np.intp] = np.add.reduce(missing, 1)
        ticks = missing * k
        ticks += np.arange(self._tick + 1, self._tick + 1 + k)
        self._tick += 2 * k
        self.gone = NOBODY
        if misses.any():
            need = misses
            if self._some_free or self.transit:
                free = self.free[lanes]
                need = np.maximum(misses - free - self.transit, 0)
                free[:] = np.maximum(free - misses, -self.transit)
                self._some_free = bool((self.free > 0).any())
            if need.any():
                self._evict(first, leased, need, now, layer)
            new = missing.ravel().nonzero()[0]
            policy.admitted(ids.take(new), ticks.take(new), now)
        policy.used(ids, ticks, now)
        return misses

    def _take_back(self, first: int, lanes: int, now: int, layer: Any) -> None:
        """So many lanes from `first` on give back the slots that they were lent."""
        free = self.free[first : first + lanes]
        if (free < 0).any():
            self._evict(first, np.zeros((lanes, 0), np.int64), np.maximum(-free, 0), now, layer)
            np.maximum(free, 0, out=free)
        self._some_free = bool((self.free > 0).any())

    def _evict(self, first: int, leased: Ints, need: Ints, now: int, layer: Any) -> None:
        """Evicts `need` [n] experts of the lanes from `first` on, none of `leased`. Lanes are sorted by `need`, largest
        first, so that every round works on a shorter table."""
        policy, width, start = self.policy, self.width, self._start
        scores = policy.scores(slice(first * width, (first + len(need)) * width), now, layer)
        order = np.argsort(-need, kind="stable")
        rounds = (len(need) - np.bincount(need).cumsum()).tolist()  # lanes that need more than 0, 1, 2 ... experts
        lanes = order[: rounds[0]]
        table = scores.reshape(-1, width).take(lanes, 0)
        flat, left = table.reshape(-1), []
        shift = start.take(lanes + first) - start[: len(lanes)]  # of each row: ids less places in the table
        flat[leased.take(lanes, 0) - shift[:, None]] = GONE
        if self._has_pins:
            table[self._stays.take(lanes + first, 0)] = GONE
        for count in rounds[:-1]:
            at = table[:count].argmin(1)
            at += start[:count]
            flat[at] = GONE
            left.append(at)
        gone = np.concatenate(left)  # places in the table
        gone += shift.take(gone // width)
        policy.left(gone)
        self.gone = np.concatenate((self.gone, gone)) if self.gone.size else gone
