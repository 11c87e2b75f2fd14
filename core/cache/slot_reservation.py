"""Reserves slots of the cache for measurement passes, and restores the experts that were in them.

Most residents stay, and the passes use a few slots of each pool: those of the experts that the policy would have
evicted first. Only these have to be fetched again.
"""

from collections.abc import Callable

from core.cache.pool import Pool
from core.cache.requests import Requests
from core.memory.slot import Slot
from core.policy.eviction import Eviction

STAYS = 2**60  # above every tick
SHARE = 4  # passes may use 1/SHARE of a pool's slots, divided by its layers, or what a pass needs if that is more


class SlotReservation:
    """`own` serves the cache before and afterwards, `borrowed` the passes: over the same slots, with a first in, first
    out policy. Only one of the two is in use at a time."""

    def __init__(self, own: Requests, least: int) -> None:
        """`least`: experts of each pool whose slots passes may use at least, as far as it has that many that are not
        pinned."""
        core, copies = own.core.over_same_slots(Eviction), own.copies.over_same_link()
        self.own, self.borrowed = own, Requests(core, copies, to_buffer=own.prefetches.to_buffer)
        orders = [self._eviction_order(pool) for pool in core.pools]
        self._residents = [eid for order in orders for eid in reversed(order)]  # those kept longest first
        stay: set[int] = set(own.core.pinned)
        for pool, order in zip(core.pools, orders, strict=True):
            spare = self._spare(pool, least)
            stay.update(order[spare:])
            for i, eid in enumerate(order):
                core.policy.admitted(eid, i if i < spare else STAYS, 0)
        core.pinned = frozenset(stay)

    def fetch_back(self, stop: Callable[[], bool]) -> None:
        """Evict new experts and fetch evicted ones again, those that the policy keeps longest first, until `stop()`.
        Raises the errors of copies; every resident is complete then, too."""
        core, copies = self.borrowed.core, self.borrowed.copies
        try:
            before = set(self._residents)
            for eid in [eid for eid, slots in enumerate(core.table) if slots and eid not in before]:
                core.evict(eid)
            core.end_leases()
            for eid in self._residents:
                if not stop():
                    if not core.is_resident(eid) and (segment := core.readmit(eid)).blocks:
                        copies.demand(segment, core.table[eid])
                    copies.wait(eid)
        finally:
            for eid in [*copies.tickets]:  # unfinished after an error
                core.evict(eid)

    def settle(self) -> None:
        """`own` is in use again: residents that were not fetched again count as evicted."""
        core, prefetches = self.own.core, self.own.prefetches
        for eid in self._residents:
            if not core.is_resident(eid):
                if eid in prefetches.fresh:
                    prefetches.waste(eid, evicted=True)
                core.policy.left(eid)

    def _spare(self, pool: Pool[Slot], least: int) -> int:
        """How many residents may have to be evicted."""
        core = self.own.core
        layers: int = len(pool.eids) // core.experts
        return max(0, max(least, pool.capacity // core.blocks // (SHARE * layers)) - len(pool.free) // core.blocks)

    def _eviction_order(self, pool: Pool[Slot]) -> list[int]:
        """The residents of a pool, the next that the policy would evict first; pinned ones last."""
        core = self.own.core
        scores = core.policy.scores(pool.part, core.now, core.layer)
        return sorted(core.residents(pool), key=lambda eid: (eid in core.pinned, scores[eid - pool.part.start], eid))
