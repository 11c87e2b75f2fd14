"""What the requests for a layer's experts become: a lease of slots, a copy to wait for, and an outcome.

The one place where requests are counted. An expert is requested in segments: the blocks that are resident, and the rest
of it, which is being copied or is fetched now. A whole expert is one segment. Part of `core.cache.expert_cache`, on the
compute thread.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any

from core.cache.copies import Copies
from core.cache.core import CacheCore
from core.cache.lease import Lease, LeasedSegment
from core.cache.prefetch_queue import PrefetchQueue
from core.memory.slot import Slot
from core.types import Outcome, Segment

Place = Callable[[int, Sequence[int]], Collection[int]]
"""(resident experts of a layer, its missing ones) -> which of these the host computes."""
MOST_BEHIND = 4  # copies of experts that the host computed: with more the link is behind, and the slots wait for them


class Requests:
    """Serves one core with its copies and its prefetches, which go `to_buffer` or evict other experts."""

    def __init__(self, core: CacheCore[Slot], copies: Copies, *, to_buffer: bool) -> None:
        self.core, self.copies = core, copies
        self.prefetches = PrefetchQueue(core, copies, to_buffer=to_buffer)
        self._fetched: list[int] = []  # on demand, for the open leases

    def acquire(self, layer: int, wanted: Sequence[int], place: Place | None = None) -> Lease:
        """Lease `wanted` (distinct experts of `layer`, at most its `capacity_for`): those with all blocks first, then
        those that lack some, whose copies are submitted, but for those that `place` leaves to the host. Raises
        RuntimeError when they do not fit."""
        core, hits, base = self.core, self.copies.hits.leases, layer * self.core.experts
        eids, table, blocks = [base + expert for expert in wanted], core.table, core.blocks
        self.prefetches.guard.used(eids)
        missing = core.lease(layer, eids)
        complete = [eid for eid in eids if len(table[eid]) == blocks] if missing else eids
        if place is not None and (left := self._left_to_host(missing, complete, place)):
            return self._lease_with_host(layer, eids, missing, complete, left)
        requests = [hits[eid] or self._complete(eid) for eid in complete]
        requests += [self._missing(eid) for eid in missing]
        return Lease(layer, eids, requests if blocks == 1 else self._with_tops(requests), requests)

    def lookup_all_hits(self, layer: int, wanted: Sequence[int]) -> list[LeasedSegment] | None:
        """What `acquire` would lease, in the order of `wanted`, if every expert is a hit and no prefetch is pending;
        None otherwise. The hits are counted but not leased: compute them before the next call to the cache."""
        core, hits, base, prefetches = self.core, self.copies.hits.leases, layer * self.core.experts, self.prefetches
        eids = [base + expert for expert in wanted]
        segments = [one for eid in eids if (one := hits[eid]) is not None]
        if len(segments) < len(wanted) or prefetches.fresh or prefetches.to_buffer:
            return None
        if not core.keeps(layer) or len({*wanted}) < len(wanted):
            return None
        prefetches.guard.used(eids)
        core.request(layer, eids)
        return segments

    def count_hits(self, first: int, wanted: Sequence[Sequence[int]]) -> None:
        """Count hits of layers from the `first` on, as `lookup_all_hits` does. `wanted`: of each the experts, distinct,
        and found in the slots of `hits_at`."""
        experts = self.core.experts
        eids = [[layer * experts + expert for expert in of] for layer, of in enumerate(wanted, first)]
        self.prefetches.guard.used(*eids)
        self.core.request(first, *eids)

    def hits_at(self) -> int:
        """As `Hits.slots_at`, as long as `lookup_all_hits` would find all that has an address there; 0 = it may not."""
        core, prefetches = self.core, self.prefetches
        if core.blocks > 1 or prefetches.fresh or prefetches.to_buffer or not all(map(core.keeps, range(core.layers))):
            return 0
        return self.copies.hits.slots_at

    def replay(
        self, routed: Sequence[Sequence[int]], in_slot: Callable[[int], bool], *, hosted: bool = False
    ) -> tuple[list[list[LeasedSegment] | None], list[int]]:
        """Request the experts `routed` [layers][k] of a token that kernels have already computed -> the requests of
        each layer in the order in which they count, None = all are hits; and the experts whose copies were submitted.

        `in_slot(eid)`: the kernels read the expert in its slot, otherwise over the link. The same requests in the same
        order as layer by layer leave the core in the same state. Copies are submitted once all layers are through, so
        that an expert that was evicted again is never copied. Experts have one block each.

        `hosted`: what had no slot was computed by the host. It is copied once, behind all else, if it is worth a slot
        and the copies of the last tokens are nearly over; nobody waits for that."""
        core, copies, admitted = self.core, self.copies, dict[int, None]()
        has_room = hosted and copies.behind_now() < MOST_BEHIND
        requests: list[list[LeasedSegment] | None] = []
        for layer, chosen in enumerate(routed):
            eids = self._requested(layer, chosen, in_slot)
            if eids is None:
                requests.append(None)
                continue
            lacking = core.lease(layer, eids)
            missing = dict.fromkeys(() if hosted else lacking)
            for eid in missing:
                self._admit(eid)
            self._end_lease(eids)
            admitted |= missing
            there = [eid for eid in eids if eid not in missing]
            self._expect_hits(there, in_slot)
            for eid in there if hosted else ():
                self._admit_behind(eid, has_room=has_room)
                copies.counts.host_computed += not in_slot(eid)
            requests.append([self._computed(eid, in_slot(eid), over_link=not hosted) for eid in (*there, *missing)])
        submitted = [eid for eid in admitted if core.is_resident(eid) and eid not in copies.tickets]
        for eid in submitted:
            copies.counts.demand_bytes += copies.demand(copies.whole[eid], core.table[eid]).bytes
        return requests, submitted

    def release(self, lease: Lease, fence: Any) -> None:
        """End a lease, whose computation is done, or on CUDA will be at `fence`."""
        tickets = self.copies.tickets
        for leased in lease.segments if fence is not None or tickets else ():
            if fence is not None:
                for slot in leased.slots:
                    slot.fence = fence
            if leased.ticket is not None:
                tickets.pop(leased.segment.eid, None)
        self._end_lease(lease.eids)
        room = MOST_BEHIND - self.copies.behind_now() if lease.hosted else 0
        for leased in lease.hosted:
            room -= self._admit_behind(leased.segment.eid, has_room=room > 0)
        for leased in lease.requests:
            if leased.ticket is not None:
                self.expect_hit(leased.segment.eid)
        if self.prefetches.to_buffer and not self.core.leased:
            self.prefetches.fill()

    def expect_hit(self, eid: int) -> None:
        """The copies of an expert are over: if all of it is resident, the next request for it is a hit."""
        core, copies = self.core, self.copies
        if len(core.table[eid]) == core.blocks and eid not in copies.tickets and eid not in self.prefetches.fresh:
            self._keep_hit(eid)

    def _requested(self, layer: int, chosen: Sequence[int], in_slot: Callable[[int], bool]) -> list[int] | None:
        """The experts of a layer that kernels have computed, each once, as of use; None = all are hits, and counted."""
        base = layer * self.core.experts
        if all(in_slot(base + e) for e in chosen) and self.lookup_all_hits(layer, chosen) is not None:
            return None
        eids = [base + expert for expert in dict.fromkeys(chosen)]
        self.prefetches.guard.used(eids)
        return eids

    def _expect_hits(self, eids: Sequence[int], in_slot: Callable[[int], bool]) -> None:
        """Kernels have read these in their slots, where `in_slot`: the next token's requests for them alone are hits of
        which nothing more has to be found out."""
        for eid in eids:
            if self.copies.hits.leases[eid] is None and in_slot(eid):
                self.expect_hit(eid)

    def _keep_hit(self, eid: int) -> LeasedSegment:
        expert, copies = eid % self.core.experts, self.copies
        leased = LeasedSegment(expert, copies.whole[eid], self.core.table[eid], Outcome.HIT, None)
        copies.hits.keep(eid, leased)
        return leased

    def abandon(self) -> None:
        """End all leases, after a pass that broke off."""
        self.core.end_leases()
        self._fetched.clear()

    def _end_lease(self, eids: Sequence[int]) -> None:
        core = self.core
        core.release(eids)
        if self._fetched and not core.leased:
            if core.transit or self.prefetches.to_buffer:
                self.copies.counts.bypassed += sum(not core.is_resident(eid) for eid in self._fetched)
            self._fetched.clear()

    def _admit(self, eid: int) -> tuple[Slot, ...]:
        """Slots for the blocks that a requested expert lacks."""
        core = self.core
        slots = core.admit_requested(eid)
        if slots is None:
            raise RuntimeError(f"layer {eid // core.experts} needs more slots than its pool has")
        self._fetched.append(eid)
        return slots

    def _left_to_host(self, missing: Sequence[int], complete: Sequence[int], place: Place) -> Collection[int]:
        """The experts that `place` leaves to the host: of those that are missing, and of those that the host computed
        before and whose copies have not landed."""
        behind = [eid for eid in complete if self.copies.is_behind(eid)] if self.copies.behind else []
        if not missing and not behind:
            return ()
        return place(len(complete) - len(behind), [*missing, *behind])

    def _lease_with_host(
        self, layer: int, eids: Sequence[int], missing: Sequence[int], complete: Sequence[int], left: Collection[int]
    ) -> Lease:
        """A lease of experts of which some are `left` to the host: nothing is copied for these now."""
        hits, copies = self.copies.hits.leases, self.copies
        segments = [hits[eid] or self._complete(eid) for eid in complete if eid not in left]
        segments += [self._missing(eid) for eid in missing if eid not in left]
        hosted = [
            LeasedSegment(eid % self.core.experts, copies.whole[eid], (), copies.miss(eid), None)
            for eid in eids
            if eid in left
        ]
        copies.counts.host_computed += len(hosted)
        return Lease(layer, eids, segments, [*segments, *hosted], hosted)

    def _admit_behind(self, eid: int, *, has_room: bool) -> bool:
        """The host has computed an expert: copy it into a slot if it is worth one, and the link is not behind ->
        whether it is copied."""
        core, copies = self.core, self.copies
        slots = None if core.is_resident(eid) else core.admit_computed(eid, copies.tickets, has_room=has_room)
        if slots is not None:
            copies.admit(copies.whole[eid], slots)
        return slots is not None

    def _complete(self, eid: int) -> LeasedSegment:
        """A request for an expert all of whose blocks have slots: ready, being copied, or a queued prefetch, which
        counts as a miss."""
        copies, prefetch = self.copies, self.prefetches.fresh.pop(eid, None)
        ticket, outcome = copies.pending(eid), Outcome.HIT
        if ticket is not None and prefetch is not None and copies.link.promote(ticket):
            copies.counts.issued(ticket, -1)
            copies.counts.demand_bytes += ticket.bytes
            self._fetched.append(eid)
            outcome = copies.miss(eid)
        else:
            if prefetch is not None:
                copies.counts.arrived(prefetch, late=ticket is not None)
                outcome = Outcome.PREFETCH_HIT
            if ticket is not None:
                outcome = Outcome.PARTIAL_HIT
                if ticket.behind:
                    copies.link.promote(ticket)
        if outcome == Outcome.HIT:
            return self._keep_hit(eid)
        segment = copies.whole[eid] if ticket is None else ticket.segment
        slots = self.core.table[eid][segment.blocks.start :]
        return LeasedSegment(eid % self.core.experts, segment, slots, outcome, ticket)

    def _missing(self, eid: int) -> LeasedSegment:
        """A request for an expert that lacks blocks: they are copied into slots, to be computed there."""
        core, copies = self.core, self.copies
        segment, outcome, slots = core.held.lacking(eid), copies.miss(eid), self._admit(eid)
        ticket = copies.demand(segment, slots, waited=outcome == Outcome.MISS)
        copies.counts.demand_bytes += ticket.bytes
        if eid in self.prefetches.lost:
            self.prefetches.blame(eid, ticket)
        return LeasedSegment(eid % core.experts, segment, slots, outcome, ticket)

    def _computed(self, eid: int, in_slot: bool, *, over_link: bool = True) -> LeasedSegment:
        """A request for an expert that kernels have read: in its slot, or `over_link`, also while a copy into its slot
        was running; or that the host has."""
        copies, outcome = self.copies, Outcome.HIT
        if not in_slot:
            outcome = copies.miss(eid)
            copies.counts.demand_bytes += copies.store.bytes_of(eid) * over_link
        return LeasedSegment(eid % self.core.experts, copies.whole[eid], (), outcome, None)

    def _with_tops(self, requests: Sequence[LeasedSegment]) -> list[LeasedSegment]:
        """All segments: before each request that is for the rest of an expert, the blocks that were resident."""
        segments = list[LeasedSegment]()
        for request in requests:
            eid, begin = request.segment.eid, request.segment.blocks.start
            if begin:
                top = self.core.table[eid][:begin]
                segments.append(LeasedSegment(request.expert, Segment(eid, range(begin)), top, Outcome.HIT, None))
                self.copies.counts.top_hits += 1
            segments.append(request)
        return segments
