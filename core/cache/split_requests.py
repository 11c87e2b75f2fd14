"""What becomes of a layer's requests where experts are cached in blocks, of some only the top, or are prefetched beside
the cache.

Part of `core.cache.expert_cache`, on the compute thread; takes the place of `core.cache.requests`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from core.cache.copies import Copies
from core.cache.core import CacheCore
from core.cache.lease import Lease, LeasedSegment
from core.cache.prefetch_buffer import PrefetchBuffer
from core.memory.slot import Slot
from core.memory.ticket import Ticket
from core.types import Outcome, Segment


class SplitRequests:
    """Of one core, its copies and its buffer."""

    def __init__(self, core: CacheCore[Slot], copies: Copies, buffer: PrefetchBuffer) -> None:
        self._core, self._copies, self._buffer = core, copies, buffer
        self._fetched: list[int] = []  # on demand, for the leases of this layer

    def acquire(self, layer: int, wanted: Sequence[int]) -> Lease:
        """Lease `wanted` (distinct experts of `layer`, at most as many as there is room for). What is there of an
        expert is a segment that can be computed at once, and what is on its way, or now fetched, is another: the rest
        of it. The request's outcome is that of the rest."""
        core, base = self._core, layer * self._core.experts
        eids = [base + expert for expert in wanted]
        missing = {*core.lease(layer, eids)}
        segments: list[LeasedSegment] = []
        requests: list[LeasedSegment] = []
        for eid in eids:
            if eid not in missing:
                self._there(eid, segments, requests)
        for eid in eids:
            if eid in missing:
                self._demand(eid, segments, requests)
        return Lease(layer, eids, segments, requests)

    def at_rest(self, layer: int, wanted: Sequence[int]) -> None:
        """As in `core.cache.requests`: never, as parts of experts may be on their way."""

    def release(self, lease: Lease, fence: Any) -> None:
        """End a lease, whose computation is done, or on CUDA will be at `fence`."""
        for leased in lease.segments:
            if fence is not None:
                for slot in leased.slots:
                    slot.fence = fence
            if leased.ticket is not None:
                self._copies.tickets.pop(leased.segment.eid, None)
        self._core.release(lease.eids)
        if not self._core.leased:
            self._copies.counts.bypassed += sum(not self._core.is_resident(eid) for eid in self._fetched)
            self._fetched.clear()
            self._buffer.fill()

    def abandon(self) -> None:
        """End all leases, after a pass that broke off."""
        self._core.end_leases()
        self._fetched.clear()

    def _there(self, eid: int, segments: list[LeasedSegment], requests: list[LeasedSegment]) -> None:
        """A request for an expert all of whose blocks have slots, of which some may be on their way."""
        copies = self._copies
        ticket, fresh = copies.pending(eid), self._buffer.fresh.pop(eid, None)
        if ticket is not None and fresh is not None and copies.link.promote(ticket):
            copies.counts.prefetch_issued -= 1
            copies.counts.demand_bytes += ticket.bytes
            self._fetched.append(eid)
            self._add(ticket.segment, ticket, copies.miss(eid), segments, requests)
            return
        if fresh is not None:
            copies.counts.arrived(fresh, late=ticket is not None)
        if ticket is not None:
            self._add(ticket.segment, ticket, Outcome.PARTIAL_HIT, segments, requests)
        else:
            outcome = Outcome.HIT if fresh is None else Outcome.PREFETCH_HIT
            self._add(copies.whole[eid], None, outcome, segments, requests)

    def _demand(self, eid: int, segments: list[LeasedSegment], requests: list[LeasedSegment]) -> None:
        """A request for an expert that lacks blocks: these are copied."""
        core, copies = self._core, self._copies
        lacking, outcome = core.held.lacking(eid), copies.miss(eid)
        slots = core.admit(eid, core.leased, in_transit=True)
        if slots is None:
            raise RuntimeError(f"layer {eid // core.experts} needs more slots than its pool and the buffer have")
        core.use(eid)
        self._fetched.append(eid)
        ticket = copies.demand(lacking, slots)
        copies.counts.demand_bytes += ticket.bytes
        self._add(lacking, ticket, outcome, segments, requests)

    def _add(
        self,
        rest: Segment,
        ticket: Ticket | None,
        outcome: Outcome,
        segments: list[LeasedSegment],
        requests: list[LeasedSegment],
    ) -> None:
        """Add the segments of an expert whose request has this outcome: its top, if that is not all, and the `rest`."""
        eid, begin = rest.eid, rest.blocks.start
        expert, slots = eid % self._core.experts, self._core.table[eid]
        if begin:
            segments.append(LeasedSegment(expert, Segment(eid, range(begin)), slots[:begin], Outcome.HIT, None))
            self._copies.counts.top_hits += 1
        last = LeasedSegment(expert, rest, slots[begin:], outcome, ticket)
        segments.append(last)
        requests.append(last)
