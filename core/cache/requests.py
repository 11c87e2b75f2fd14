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
from core.types import Outcome, Segment


class Requests:
    """Of one core, its copies and its prefetches."""

    def __init__(self, core: CacheCore[Slot], copies: Copies, queue: PrefetchQueue) -> None:
        self._core, self._copies, self._queue = core, copies, queue
        self._fetched: list[int] = []  # on demand, for the leases of this layer

    def acquire(self, layer: int, wanted: Sequence[int]) -> Lease:
        """Lease `wanted` (distinct experts of `layer`, at most its pool's capacity): those with slots first, then those
        missing, whose copies are submitted. An expert is one segment: all of its blocks are resident, or none."""
        core, tickets, fresh, base = self._core, self._copies.tickets, self._queue.fresh, layer * self._core.experts
        table, whole = core.table, self._copies.whole
        eids = [base + expert for expert in wanted]
        missing = core.lease(layer, eids)
        self._queue.guard.used(eids)
        segments = [
            LeasedSegment(eid - base, whole[eid], slots, Outcome.HIT, None)
            if eid not in tickets and eid not in fresh
            else self._hit(eid - base, whole[eid], slots)
            for eid in eids
            if (slots := table[eid])
        ]
        segments += [self._miss(eid - base, whole[eid]) for eid in missing]
        return Lease(layer, segments, segments)

    def release(self, lease: Lease, fence: Any) -> None:
        """End a lease, whose computation is done, or on CUDA will be at `fence`."""
        for leased in lease.segments:
            if fence is not None:
                for slot in leased.slots:
                    slot.fence = fence
            if leased.ticket is not None:
                self._copies.tickets.pop(leased.segment.eid, None)
        self._core.release([leased.segment.eid for leased in lease.segments])
        if not self._core.leased:
            if self._core.transit:
                self._copies.counts.bypassed += sum(not self._core.is_resident(eid) for eid in self._fetched)
            self._fetched.clear()

    def abandon(self) -> None:
        """End all leases, after a pass that broke off."""
        self._core.end_leases()
        self._fetched.clear()

    def _miss(self, expert: int, segment: Segment) -> LeasedSegment:
        """A request for an expert without slots: it is copied into some, to be computed there."""
        core, copies, eid = self._core, self._copies, segment.eid
        slots = core.admit(eid, core.leased, in_transit=True)
        if slots is None:
            raise RuntimeError(f"layer {eid // core.experts} needs more slots than its pool has")
        core.use(eid)
        self._fetched.append(eid)
        outcome, ticket = copies.miss(eid), copies.demand(segment, slots)
        copies.counts.demand_bytes += ticket.bytes
        if self._queue.lost:
            self._queue.demanded(eid, ticket)
        return LeasedSegment(expert, segment, slots, outcome, ticket)

    def _hit(self, expert: int, segment: Segment, slots: Sequence[Slot]) -> LeasedSegment:
        """A request for an expert with slots: ready, being copied, or only queued (which counts as a miss)."""
        copies, eid = self._copies, segment.eid
        ticket, fresh = copies.pending(eid), self._queue.fresh.pop(eid, None)
        if ticket is not None and fresh is not None and copies.link.promote(ticket):
            copies.counts.prefetch_issued -= 1
            copies.counts.demand_bytes += ticket.bytes
            self._fetched.append(eid)
            return LeasedSegment(expert, segment, slots, copies.miss(eid), ticket)
        if fresh is not None:
            copies.counts.arrived(fresh, late=ticket is not None)
        if ticket is not None:
            return LeasedSegment(expert, segment, slots, Outcome.PARTIAL_HIT, ticket)
        return LeasedSegment(expert, segment, slots, Outcome.HIT if fresh is None else Outcome.PREFETCH_HIT, None)
