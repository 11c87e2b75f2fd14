"""The engine's cache without its bytes: the very same policies over ids, all layers and sizes at once.

A lane is one pool of slots: a layer of one of several caches that differ in size, or with scope "global" a whole cache.
Lanes never influence each other. What a pass does is what `core.runtime.residency` and `core.runtime.moe_step` do: hits
are used first, in the order in which the router named them; then, one after the other, each missing expert gets a free
slot, or that of whoever the policy would let go among those the pass does not need.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from core.errors import SettingError
from core.policy.eviction import GONE, Eviction, Roster, victim
from core.policy.hints import Hints
from core.policy.slots import shares, waves

Ints = npt.NDArray[np.int64]
NOBODY: Ints = np.zeros(0, np.int64)


class Cache:
    """`slots[c]` = slots of copy c. Ids are those of `core.policy.eviction.Roster`."""

    def __init__(self, make: Callable[[Roster], Eviction], layers: int, experts: int, top_k: int, scope: str,
                 slots: Sequence[int], hints: Hints | None = None) -> None:
        """Raises SettingError when a lane has fewer slots than a token needs in a layer."""
        self.roster = Roster(layers, experts, len(slots), hints)
        self.policy = make(self.roster)
        pools = layers if scope == "layer" else 1
        self.scope, self.lanes, self.width = scope, pools * len(slots), self.roster.size // (pools * len(slots))
        self.capacity: Ints = np.array([share for n in slots for share in shares(min(n, layers * experts), pools)])
        if least := [n for n in slots if shares(n, pools)[-1] < top_k]:
            raise SettingError(f"{least[0]} slots are too few: a token needs {top_k} experts in a layer, so "
                               f"{f'{layers} layers with slots of their own need' if pools > 1 else 'a cache needs'} "
                               f"at least {top_k * pools}.")
        self.free = self.capacity.copy()
        self._room = True                                       # some lane has free slots
        self._tick = 0
        self._start: Ints = np.arange(self.lanes) * self.width
        self._all = slice(0, self.roster.size)
        self.missing: npt.NDArray[np.bool_] = np.zeros((self.lanes, top_k), np.bool_)   # of the last `together` ...
        self.gone = NOBODY                                      # ... and who left: of each lane, first to last

    def fill(self) -> None:
        """Experts into the free slots, every layer's first ones first, as the engine does after a load."""
        if not self.policy.keeps:
            return
        roster = self.roster
        for copy in range(roster.copies):
            for expert in range(roster.experts):
                for layer in range(roster.layers):
                    eid = (copy * roster.layers + layer) * roster.experts + expert
                    lane = eid // self.width
                    if self.free[lane]:
                        self.free[lane] -= 1
                        self._tick += 1
                        self.policy.admitted(eid, self._tick, 0)
        self._room = bool(self.free.any())

    def together(self, ids: Ints, now: int, layer: Any) -> npt.NDArray[np.intp]:
        """One token: every lane needs its row of `ids` [lanes, k], all distinct -> misses [lanes].

        `layer`: the layer of every id of the roster, or one for all when the lanes are whole caches.
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
        if not policy.keeps:
            policy.left(ids)
            self.free = self.free + k
            self._room = True
        return misses

    def _evict(self, ids: Ints, held: npt.NDArray[Any], need: Ints, now: int, layer: Any) -> None:
        """`need` [lanes] experts leave, and none of `ids`. Lanes that need most stand first, so that every round deals
        with a shorter table."""
        policy, start = self.policy, self._start
        scores = policy.scores(self._all, now, layer)
        scores[ids] = GONE
        order = np.argsort(-need, kind="stable")
        rounds = (self.lanes - np.bincount(need).cumsum()).tolist()   # lanes that need more than 0, 1, 2 ... experts
        lanes = order[: rounds[0]]
        table = scores.reshape(self.lanes, self.width).take(lanes, 0)
        if not policy.moves:
            scores[ids] = held                                  # it was the policy's own array
        flat, left = table.reshape(-1), []
        for count in rounds[:-1]:
            at = table[:count].argmin(1)
            at += start[:count]
            flat[at] = GONE
            left.append(at)
        gone = np.concatenate(left)                             # places in the table
        gone += (start.take(lanes) - start[: len(lanes)]).take(gone // self.width)
        policy.left(gone)
        self.gone = gone

    def alone(self, lane: int, wanted: Sequence[int], now: int, layer: int) -> int:
        """One lane needs any number of distinct experts in one pass, in waves if they do not fit -> misses."""
        policy, capacity = self.policy, int(self.capacity[lane])
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
                gone = victim(policy, part, now, layer, leased)
                assert gone is not None, "a pass needs more slots than its lane has"
                policy.left(gone)
            self._tick += 1
            policy.admitted(eid, self._tick, now)
            policy.used(eid, self._tick, now)
        return len(missing)

    def _release(self, lane: int, wanted: Sequence[int], leased: set[int]) -> None:
        leased.difference_update(wanted)
        if not self.policy.keeps:
            for eid in wanted:
                self.policy.left(eid)
            self.free[lane] += len(wanted)
