"""The cache while layers are computed. Leases make it impossible to evict what is being used.

Everything here runs on the one thread that computes; copies land on others. `acquire` pins what a layer needs and
fetches what is missing, `prefetch` fetches what may be needed, `release` unpins. Counting follows METHODS section 9.
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
    """The cache: the map of `core.cache.slot_map`, and the verbs of a layer."""

    def arrive(self, layer: int, wanted: Sequence[int]) -> None:
        """The routing of `layer` is known: what was prefetched for it and is not `wanted` was in vain."""
        self.ahead.arrive(layer, wanted)

    def acquire(self, layer: int, wanted: Sequence[int]) -> Lease:
        """Pin `wanted` (distinct experts of `layer`, at most its pool's capacity); fetch the missing on demand."""
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
        """Fetch experts ahead, by priority, for as long as there is a slot that nothing better occupies.

        `at` = the layer in which the guesses are made, -1 before the first. What was guessed earlier and is still
        queued is ranked anew beside them; it leaves its slot to a better guess, or when it would come too late.
        """
        if self.policy.uses_hints:
            self.hints.name(guesses)
        self.ahead.issue(guesses, at, self.phase, self._pools, self.store.blob_bytes, self._fetch_ahead)

    def release(self, lease: Lease, fence: Any = None) -> None:
        """The computation is done, or on CUDA will be at `fence`; its experts may be evicted again."""
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
        """A pass broke off within a layer: nothing is in use any more, and what could not be copied is not resident."""
        self._leased.clear()
        for eid in [eid for eid, ticket in self._tickets.items() if ticket.error is not None]:
            self.evict(self.pool(eid // self.experts), eid)

    def lacking(self, layer: int, wanted: Sequence[int]) -> list[int]:
        """Those of `wanted` that would have to be fetched: no slot, or a copy that is only queued."""
        base, slots, tickets = layer * self.experts, self._slot, self._tickets
        return [
            e
            for e in wanted
            if slots[base + e] is None or ((ticket := tickets.get(base + e)) is not None and ticket.state == QUEUED)
        ]

    def standing(self, layer: int) -> tuple[list[bool], list[bool]]:
        """Of each expert of `layer`: would it have to be fetched, can it be computed at once? Neither: on its way."""
        base = layer * self.experts
        ready = [slot is not None for slot in self._slot[base : base + self.experts]]
        missing = [not one for one in ready]
        for eid, ticket in self._tickets.items():
            if 0 <= eid - base < self.experts and not self.transfers.landed(ticket):
                ready[eid - base], missing[eid - base] = False, ticket.state == QUEUED
        return missing, ready

    def take_counts(self) -> Counts:
        """Hand over the counts since the last call."""
        counts, self.counts = self.counts, Counts()
        return counts

    @property
    def expects(self) -> bool:
        """Something was prefetched whose layer has not been reached since."""
        return bool(self.ahead.fresh)

    def _hit(self, expert: int, eid: int, slot: Slot) -> LeasedExpert:
        """A request for something that has a slot: ready, still travelling, or only queued (then it is a miss)."""
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
        """A slot for a prefetch, and its copy for the queue; None when only what is better could leave."""
        self._gone = -1
        slot = self._make_room(pool, self._leased, named, self.ahead.fresh, self._tickets, self.pinned)
        if slot is None:
            return None
        ticket = self._ticket(eid, slot, False)
        ticket.displaced = self._gone
        self._place(eid, slot, ticket)
        return ticket
