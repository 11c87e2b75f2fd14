"""Temporarily hands the cache to measurement passes and restores it.

Most residents stay, and the passes use a few slots of each pool: those of the experts that the policy would have
evicted first. Only these have to be fetched back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from core.cache.lease import Counts
from core.cache.pool import Pool
from core.cache.prefetch_queue import PrefetchQueue
from core.cache.slot_map import SlotMap
from core.policy.eviction import Eviction, ExpertIndex
from core.policy.hints import Hints

STAYS = 2**60  # above every tick
SHARE = 4  # passes may use 1/SHARE of a pool's slots, divided by its layers, or what a pass needs if that is more


@dataclass(slots=True)
class Aside:
    """Saved state of a cache. `residents`: eids, with those first that the policy would keep longest."""

    residents: list[int]
    policy: Eviction
    hints: Hints
    ahead: PrefetchQueue
    counts: Counts
    pinned: frozenset[int]
    last_used: list[int]
    now: int
    phase: str
    layer: int
    tick: int


@dataclass(slots=True)
class Lendable(SlotMap):
    """The map of `core.cache.slot_map`, which can be saved and restored between two passes."""

    def quiet(self) -> bool:
        """Whether no copy is queued or under way."""
        return all(ticket.error is not None or self.transfers.landed(ticket) for ticket in self._tickets.values())

    def set_aside(self, least: int) -> Aside:
        """Save the state and prepare the cache for other passes; only while it is `quiet`. They may use at least
        `least` slots of each pool, as far as it has that many that are not pinned."""
        assert self.quiet() and not self._leased, "the cache is in use"
        for eid in [eid for eid, ticket in self._tickets.items() if ticket.error is not None]:
            self.evict(self.pool(eid // self.experts), eid)
        self._tickets.clear()  # all landed: their experts are resident
        orders = [self._worth(pool) for pool in self._pools]
        aside = Aside(
            [eid for order in orders for eid in reversed(order)],
            self.policy,
            self.hints,
            self.ahead,
            self.counts,
            self.pinned,
            self.last_used[:],
            self.now,
            self.phase,
            self._layer,
            self._tick,
        )
        self.hints = Hints(self.layers, self.experts)
        self.policy = Eviction(ExpertIndex(self.layers, self.experts, hints=self.hints))  # first in, first out
        self.ahead, self.counts = PrefetchQueue(self, self.layers), Counts()
        stay: set[int] = set(self.pinned)
        for pool, order in zip(self._pools, orders, strict=True):
            spare = self._spare(pool, least)
            stay.update(order[spare:])
            for i, eid in enumerate(order):
                self.policy.admitted(eid, i if i < spare else STAYS, 0)
        self.pinned = frozenset(stay)
        return aside

    def take_back(self, aside: Aside, stop: Callable[[], bool]) -> None:
        """Restore the saved state. Evicted experts are fetched back, the most valuable first, until `stop()`; the
        remaining ones count as evicted. Raises the errors of copies; the cache is consistent then, too."""
        self._leased.clear()
        was = set(aside.residents)
        try:
            for eid in [eid for eid, slot in enumerate(self._slot) if slot is not None and eid not in was]:
                self.evict(self.pool(eid // self.experts), eid)
            for eid in aside.residents:
                if not stop():
                    self._fetch_back(eid)
        finally:
            for eid in [*self._tickets]:  # unfinished after an error
                self.evict(self.pool(eid // self.experts), eid)
            self._restore(aside)

    def _fetch_back(self, eid: int) -> None:
        if self._slot[eid] is None:
            slot = self.pool(eid // self.experts).free.pop()
            self._admit(eid, slot, self._ticket(eid, slot, True))
        if eid in self._tickets:
            self.transfers.wait(self._tickets[eid])
            del self._tickets[eid]

    def _restore(self, aside: Aside) -> None:
        self.policy, self.hints, self.ahead, self.counts = aside.policy, aside.hints, aside.ahead, aside.counts
        self.pinned, self.last_used = aside.pinned, aside.last_used
        self.now, self.phase, self._layer, self._tick = aside.now, aside.phase, aside.layer, aside.tick
        for eid in [eid for eid in aside.residents if self._slot[eid] is None]:
            if eid in self.ahead.fresh:
                self.ahead.waste(eid, evicted=True)
            self.policy.left(eid)

    def _spare(self, pool: Pool, least: int) -> int:
        """How many residents may have to be evicted."""
        layers: int = (pool.part.stop - pool.part.start) // self.experts
        return max(0, max(least, pool.capacity // (SHARE * layers)) - len(pool.free))

    def _worth(self, pool: Pool) -> list[int]:
        """The residents of a pool in order of eviction by the policy; pinned ones last."""
        scores = self.policy.scores(pool.part, self.now, self._layer)
        return sorted(self._residents(pool), key=lambda eid: (eid in self.pinned, scores[eid - pool.part.start], eid))
