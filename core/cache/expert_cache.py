"""The expert cache during computation. Leases make it impossible to evict an expert in use.

All of this runs on the compute thread; copies are made by other threads. `acquire` leases a layer's experts and fetches
the missing ones, `prefetch` fetches experts that may be needed, `release` ends a lease. Counting follows METHODS
section 9.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from core.cache.lease import Counts, Lease, LeasedExpert
from core.cache.pool import Pool
from core.cache.snapshot import Lendable
from core.memory.slot import Slot
from core.memory.ticket import QUEUED, Ticket
from core.policy.predict import Guess
from core.types import Outcome


@dataclass(slots=True)
class ExpertCache(Lendable):
    """The slot map of `core.cache.slot_map` plus the operations of a layer's computation."""

    def arrive(self, layer: int, wanted: Sequence[int]) -> None:
        """The routing of `layer` is known: prefetches for it that are not `wanted` are cancelled or counted as
        wasted."""
        self.ahead.arrive(layer, wanted)

    def acquire(self, layer: int, wanted: Sequence[int]) -> Lease:
        """Lease `wanted` (distinct experts of `layer`, at most its pool's capacity); fetch the missing ones on
        demand."""
        base, pool, now, used, tick = layer * self.experts, self.pool(layer), self.now, self.policy.used, self._tick
        self._layer = layer
        self.hints.reached(layer)
        held: list[LeasedExpert] = []
        missing: list[int] = []
        for expert in wanted:
            eid = base + expert
            self._leased[eid] = self._leased.get(eid, 0) + 1
            slot = self._slot[eid]
            if slot is None:
                missing.append(expert)
                continue
            settled = eid not in self._tickets and eid not in self.ahead.fresh
            held.append(LeasedExpert(expert, eid, slot, Outcome.HIT, None) if settled else self._hit(expert, eid, slot))
            tick += 1
            used(eid, tick, now)
            self.last_used[eid] = now
        self._tick = tick
        for expert in missing:
            eid = base + expert
            slot = self._make_room(pool, self._leased)
            if slot is None:
                raise RuntimeError(f"layer {layer} needs more slots than its pool has")
            ticket, outcome = self._ticket(eid, slot, True), self._missed(eid)
            self._admit(eid, slot, ticket)
            used(eid, self._tick, now)
            self.last_used[eid] = now
            self.counts.demand_bytes += ticket.bytes
            if self.ahead.lost:
                self.ahead.demanded(eid, ticket)
            held.append(LeasedExpert(expert, eid, slot, outcome, ticket))
        return Lease(layer, held)

    def prefetch(self, guesses: Sequence[Guess], at: int) -> None:
        """Prefetch experts by priority, as long as there is a slot that holds nothing better.

        `at` = the layer in which the predictions are made, -1 before the first. Queued prefetches of earlier
        predictions are ranked again together with the new ones; one gives up its slot to a better prediction, or when
        it would come too late.
        """
        if self.policy.uses_hints:
            self.hints.name(guesses)
        self.ahead.issue(guesses, at, self.phase, self._pools, self.store.blob_bytes, self._fetch_ahead)

    def release(self, lease: Lease, fence: Any = None) -> None:
        """End a lease: its computation is done, or on CUDA will be at `fence`. Its experts may be evicted again."""
        pool = self.pool(lease.layer)
        for held in lease.held:
            held.slot.fence = fence
            self._tickets.pop(held.eid, None)
            self._leased[held.eid] -= 1
            if not self._leased[held.eid]:
                del self._leased[held.eid]
                if not self.policy.retains and held.eid not in self.pinned:
                    self.evict(pool, held.eid)

    def abandon(self) -> None:
        """After a pass that broke off within a layer: ends all leases and evicts experts whose copy failed."""
        self._leased.clear()
        for eid in [eid for eid, ticket in self._tickets.items() if ticket.error is not None]:
            self.evict(self.pool(eid // self.experts), eid)

    def lacking(self, layer: int, wanted: Sequence[int]) -> list[int]:
        """Those of `wanted` that would have to be fetched: without a slot, or with a copy that is only queued."""
        base, slots, tickets = layer * self.experts, self._slot, self._tickets
        return [
            e
            for e in wanted
            if slots[base + e] is None or ((ticket := tickets.get(base + e)) is not None and ticket.state == QUEUED)
        ]

    def standing(self, layer: int) -> tuple[list[bool], list[bool]]:
        """For each expert of `layer`: (would have to be fetched, is ready to compute). Both False: being copied."""
        base = layer * self.experts
        ready = [slot is not None for slot in self._slot[base : base + self.experts]]
        missing = [not one for one in ready]
        for eid, ticket in self._tickets.items():
            if 0 <= eid - base < self.experts and not self.transfers.landed(ticket):
                ready[eid - base], missing[eid - base] = False, ticket.state == QUEUED
        return missing, ready

    def take_counts(self) -> Counts:
        """Return the counts since the last call and reset them."""
        counts, self.counts = self.counts, Counts()
        return counts

    @property
    def expects(self) -> bool:
        """Whether an expert was prefetched whose layer has not been reached since."""
        return bool(self.ahead.fresh)

    def _hit(self, expert: int, eid: int, slot: Slot) -> LeasedExpert:
        """A request for an expert with a slot: ready, being copied, or only queued (which counts as a miss)."""
        ticket, fresh = self._tickets.get(eid), self.ahead.fresh.pop(eid, None)
        if ticket is not None and self.transfers.landed(ticket):
            del self._tickets[eid]
            ticket = None
        if ticket is not None and fresh is not None and self.transfers.promote(ticket):
            self.counts.issued -= 1
            self.counts.demand_bytes += ticket.bytes
            return LeasedExpert(expert, eid, slot, self._missed(eid), ticket)
        if fresh is not None:
            self.counts.arrived(fresh, late=ticket is not None)
        if ticket is not None:
            return LeasedExpert(expert, eid, slot, Outcome.LATE, ticket)
        return LeasedExpert(expert, eid, slot, Outcome.HIT if fresh is None else Outcome.PREFETCH_HIT, None)

    def _fetch_ahead(self, eid: int, pool: Pool, named: Collection[int]) -> Ticket | None:
        """Assign a slot for a prefetch and return its copy for the queue; None when only better experts could be
        evicted."""
        self._gone = -1
        slot = self._make_room(pool, self._leased, named, self.ahead.fresh, self._tickets, self.pinned)
        if slot is None:
            return None
        ticket = self._ticket(eid, slot, False)
        ticket.displaced = self._gone
        self._place(eid, slot, ticket)
        return ticket
