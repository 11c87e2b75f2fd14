"""What becomes of a layer's requests: each expert is leased from its slots, or fetched into some.

Part of `core.cache.expert_cache`, on the compute thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from core.cache.copies import Copies
from core.cache.core import CacheCore
from core.cache.lease import Lease, LeasedSegment
from core.cache.prefetch_queue import PrefetchQueue
from core.memory.slot import Slot
from core.types import Outcome


class Requests:
    """Of one core, its copies and its prefetches."""

    def __init__(self, core: CacheCore[Slot], copies: Copies, queue: PrefetchQueue) -> None:
        self._core, self._copies, self._queue = core, copies, queue
        self._fetched: list[int] = []  # on demand, for the leases of this layer

    def acquire(self, layer: int, wanted: Sequence[int]) -> Lease:
        """Lease `wanted` (distinct experts of `layer`, at most its pool's capacity): those with slots first, then those
        missing, whose copies are submitted. An expert is one segment: all of its blocks are resident, or none."""
        core, settled, base = self._core, self._copies.settled, layer * self._core.experts
        eids = [base + expert for expert in wanted]
        self._queue.guard.used(eids)
        missing = core.lease(layer, eids)
        there = [eid for eid in eids if core.table[eid]] if missing else eids
        segments = [settled[eid] or self._hit(eid) for eid in there]
        segments += [self._miss(eid) for eid in missing]
        return Lease(layer, eids, segments, segments)

    def at_rest(self, layer: int, wanted: Sequence[int]) -> list[LeasedSegment] | None:
        """What `acquire` would lease, in the order of `wanted`, where all of it is known to be whole and at rest, and
        nothing was prefetched; None elsewhere. It counts as requested and is not leased: to be computed at once, before
        anything else is asked of the cache."""
        core, settled, base = self._core, self._copies.settled, layer * self._core.experts
        eids = [base + expert for expert in wanted]
        segments = [one for eid in eids if (one := settled[eid]) is not None]
        if len(segments) < len(wanted) or self._queue.fresh or not core.keeps(layer) or len({*wanted}) < len(wanted):
            return None
        self._queue.guard.used(eids)
        core.request(layer, eids)
        return segments

    def release(self, lease: Lease, fence: Any) -> None:
        """End a lease, whose computation is done, or on CUDA will be at `fence`."""
        tickets = self._copies.tickets
        for leased in lease.segments if fence is not None or tickets else ():
            if fence is not None:
                for slot in leased.slots:
                    slot.fence = fence
            if leased.ticket is not None:
                tickets.pop(leased.segment.eid, None)
        self._core.release(lease.eids)
        if self._fetched and not self._core.leased:
            if self._core.transit:
                self._copies.counts.bypassed += sum(not self._core.is_resident(eid) for eid in self._fetched)
            self._fetched.clear()

    def abandon(self) -> None:
        """End all leases, after a pass that broke off."""
        self._core.end_leases()
        self._fetched.clear()

    def _miss(self, eid: int) -> LeasedSegment:
        """A request for an expert without slots: it is copied into some, to be computed there."""
        core, copies = self._core, self._copies
        slots = core.admit(eid, core.leased, in_transit=True)
        if slots is None:
            raise RuntimeError(f"layer {eid // core.experts} needs more slots than its pool has")
        core.use(eid)
        self._fetched.append(eid)
        outcome, ticket = copies.miss(eid), copies.demand(copies.whole[eid], slots)
        copies.counts.demand_bytes += ticket.bytes
        if self._queue.lost:
            self._queue.demanded(eid, ticket)
        return LeasedSegment(eid % core.experts, ticket.segment, slots, outcome, ticket)

    def _hit(self, eid: int) -> LeasedSegment:
        """A request for an expert with slots: ready, being copied, or only queued (which counts as a miss)."""
        copies, fresh = self._copies, self._queue.fresh.pop(eid, None)
        ticket, outcome = copies.pending(eid), Outcome.HIT
        if ticket is not None and fresh is not None and copies.link.promote(ticket):
            copies.counts.prefetch_issued -= 1
            copies.counts.demand_bytes += ticket.bytes
            self._fetched.append(eid)
            outcome = copies.miss(eid)
        else:
            if fresh is not None:
                copies.counts.arrived(fresh, late=ticket is not None)
                outcome = Outcome.PREFETCH_HIT
            if ticket is not None:
                outcome = Outcome.PARTIAL_HIT
        leased = LeasedSegment(eid % self._core.experts, copies.whole[eid], self._core.table[eid], outcome, ticket)
        if outcome == Outcome.HIT:
            copies.settled[eid] = leased
        return leased
