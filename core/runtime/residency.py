"""Which expert is in which slot: the only such map. Leases make it impossible to evict what is being used.

Everything here runs on the one thread that computes; copies land on others. `acquire` pins what a layer needs and
fetches what is missing, `prefetch` fetches what may be needed, `release` unpins. Counting follows METHODS section 9.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from core.memory.arena import Arena, Slot
from core.memory.store import Store
from core.memory.transfer import QUEUED, Ticket, TransferEngine
from core.policy.eviction import GONE, Eviction, Roster, victim
from core.policy.hints import Hints
from core.policy.predict import Guess
from core.policy.slots import shares
from core.runtime.lease import Counts, Held, Lease
from core.runtime.pool import Pool, fitting, resize
from core.types import Outcome, Place


@dataclass(slots=True)
class Residency:
    """The cache. `slots` is how many experts the device may hold; `make_policy` builds what chooses who leaves."""

    layers: int
    experts: int
    arena: Arena
    store: Store
    transfers: TransferEngine
    make_policy: Callable[[Roster], Eviction]
    scope: str
    slots: int
    now: int = 0                                                   # forward passes so far
    phase: str = "prefill"
    counts: Counts = field(default_factory=Counts)
    last_used: list[int] = field(init=False)
    hints: Hints = field(init=False)                               # what predictors tell the policy
    policy: Eviction = field(init=False)
    _tick: int = 0                                                 # requests and admissions so far
    _layer: int = 0                                                # being computed
    _slot: list[Slot | None] = field(init=False)                   # eid -> slot: the map
    _pools: list[Pool] = field(init=False)
    _tickets: dict[int, Ticket] = field(default_factory=dict)      # eid -> its unfinished copy
    _fresh: dict[int, Ticket] = field(default_factory=dict)        # prefetched, its layer not reached since
    _leased: dict[int, int] = field(default_factory=dict)          # eid -> how many leases hold it

    def __post_init__(self) -> None:
        self._slot = [None] * (self.layers * self.experts)
        self.last_used = [-1] * len(self._slot)
        self.hints, self._pools = Hints(self.layers, self.experts), []
        self._build_pools()

    # ------------------------------------------------------------------ the verbs of a layer

    def arrive(self, layer: int, wanted: Sequence[int]) -> None:
        """The routing of `layer` is known: what was prefetched for it and is not `wanted` was in vain."""
        low, high = layer * self.experts, (layer + 1) * self.experts
        for eid in [e for e in self._fresh if low <= e < high and e - low not in wanted]:
            if self._fresh[eid].state == QUEUED:
                self._evict(self.pool(layer), eid)
            else:
                self._waste(eid)

    def acquire(self, layer: int, wanted: Sequence[int]) -> Lease:
        """Pin `wanted` (distinct experts of `layer`, at most its pool's capacity); fetch the missing on demand."""
        base, pool, now, used, tick = layer * self.experts, self.pool(layer), self.now, self.policy.used, self._tick
        self._layer = layer
        self.hints.reached(layer)
        held: list[Held] = []
        missing: list[int] = []
        for expert in wanted:
            eid = base + expert
            self._leased[eid] = self._leased.get(eid, 0) + 1
            slot = self._slot[eid]
            if slot is None:
                missing.append(expert)
                continue
            settled = eid not in self._tickets and eid not in self._fresh
            held.append(Held(expert, eid, slot, Outcome.HIT, None) if settled else self._hit(expert, eid, slot))
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
            held.append(Held(expert, eid, slot, outcome, ticket))
        return Lease(layer, held)

    def prefetch(self, guesses: Sequence[Guess]) -> None:
        """Fetch experts ahead, best first, for as long as there is a slot that nothing better occupies."""
        if self.policy.heeds:
            self.hints.name(guesses)
        named = fitting(guesses, self._pools, self.experts)
        for eid, pool in named.items():
            blocked = self._leased, named, self._fresh, self._tickets
            if self._slot[eid] is None and (slot := self._make_room(pool, *blocked)) is not None:
                self._fresh[eid] = ticket = self._ticket(eid, slot, False)
                self._admit(eid, slot, ticket)
                self.counts.issued += 1

    def release(self, lease: Lease, fence: Any = None) -> None:
        """The computation is done, or on CUDA will be at `fence`; its experts may be evicted again."""
        pool = self.pool(lease.layer)
        for held in lease.held:
            held.slot.fence = fence
            self._tickets.pop(held.eid, None)
            self._leased[held.eid] -= 1
            if not self._leased[held.eid]:
                del self._leased[held.eid]
                if not self.policy.keeps:
                    self._evict(pool, held.eid)

    def abandon(self) -> None:
        """A pass broke off within a layer: nothing is in use any more, and what could not be copied is not resident."""
        self._leased.clear()
        for eid in [eid for eid, ticket in self._tickets.items() if ticket.error is not None]:
            self._evict(self.pool(eid // self.experts), eid)

    def reshape(self, *, slots: int | None = None, scope: str | None = None,
                make_policy: Callable[[Roster], Eviction] | None = None) -> None:
        """Change size, scope or policy between two passes; the experts used last stay. No lease may be open."""
        if self._leased:
            raise RuntimeError("the cache cannot be changed while a layer is computed")
        self.slots = self.slots if slots is None else slots
        self.scope = scope or self.scope
        self.make_policy = make_policy or self.make_policy
        if scope is None and make_policy is None:
            self._resize_pools()
        else:
            self._build_pools()

    def fill(self) -> None:
        """Put experts into the free slots, every layer's first ones first: a fresh cache need not be an empty one."""
        pairs = ((layer, expert) for expert in range(self.experts) for layer in range(self.layers))
        for layer, expert in pairs:
            pool, eid = self.pool(layer), layer * self.experts + expert
            if pool.free and self.policy.keeps and self._slot[eid] is None:
                slot = pool.free.pop()
                self._admit(eid, slot, self._ticket(eid, slot, True))
        for eid in list(self._tickets):
            self.transfers.wait(self._tickets.pop(eid))
        self.transfers.forget()

    def clear(self) -> None:
        """Evict everything and free every slot, when the model is unloaded."""
        for pool in self._pools:
            for eid in self._residents(pool):
                self._evict(pool, eid)
            while pool.free:
                self.arena.free(pool.free.pop())

    def take_counts(self) -> Counts:
        """Hand over the counts since the last call."""
        counts, self.counts = self.counts, Counts()
        return counts

    def pool(self, layer: int) -> Pool:
        """The pool whose slots `layer` uses."""
        return self._pools[layer] if len(self._pools) > 1 else self._pools[0]

    @property
    def expects(self) -> bool:
        """Something was prefetched whose layer has not been reached since."""
        return bool(self._fresh)

    def is_resident(self, eid: int) -> bool:
        """In a slot, or on its way into one."""
        return self._slot[eid] is not None

    def sample(self, most: int) -> list[Slot]:
        """Some filled slots, for trying out how to compute."""
        return [slot for slot in self._slot if slot is not None][:most]

    def places(self) -> list[int]:
        """Where each expert is, by eid, as core.types.Place says it. Safe to call from any thread."""
        flying = {eid for eid, ticket in self._tickets.copy().items() if not self.transfers.landed(ticket)}
        return [(Place.DISK if self.store.origin(eid) == "disk" else Place.HOST) if slot is None
                else Place.IN_FLIGHT if eid in flying else Place.RESIDENT for eid, slot in enumerate(self._slot)]

    def check_integrity(self) -> None:
        """Raise AssertionError unless every invariant of the map holds. Call it between two passes."""
        held = {eid: slot.index for eid, slot in enumerate(self._slot) if slot is not None}
        assert len(set(held.values())) == len(held), "two experts share a slot"
        free = [slot.index for pool in self._pools for slot in pool.free]
        assert len({*free, *held.values()}) == len(free) + len(held), "a slot is free and occupied"
        assert len(free) + len(held) == len(self.arena) == self.slots, "slots, arena and budget do not add up"
        assert all(len(self._residents(p)) + len(p.free) == p.capacity for p in self._pools), "a slot was lost or found"
        assert [*held] == np.flatnonzero(self.policy.score != GONE).tolist(), "the policy and the map disagree"
        assert {*self._tickets, *self._fresh, *self._leased} <= set(held), "a copy or a lease without a slot"

    def _hit(self, expert: int, eid: int, slot: Slot) -> Held:
        """A request for something that has a slot: ready, still travelling, or only queued (then it is a miss)."""
        ticket, fresh = self._tickets.get(eid), self._fresh.pop(eid, None)
        if ticket is not None and self.transfers.landed(ticket):
            del self._tickets[eid]
            ticket = None
        if ticket is not None and fresh is not None and self.transfers.promote(ticket):
            self.counts.issued -= 1
            self.counts.demand_bytes += ticket.bytes
            return Held(expert, eid, slot, self._missed(eid), ticket)
        if fresh is not None:
            self.counts.arrived(fresh.bytes, late=ticket is not None)
        if ticket is not None:
            return Held(expert, eid, slot, Outcome.LATE, ticket)
        return Held(expert, eid, slot, Outcome.HIT if fresh is None else Outcome.PREFETCH_HIT, None)

    def _ticket(self, eid: int, slot: Slot, demand: bool) -> Ticket:
        return Ticket(eid, slot, self.store.blob_bytes, demand, self.phase)

    def _missed(self, eid: int) -> Outcome:
        return Outcome.MISS_DISK if self.store.origin(eid) == "disk" else Outcome.MISS

    def _waste(self, eid: int) -> None:
        """What was prefetched for nothing: taken back while it is queued, counted once it has used the link."""
        ticket = self._fresh.pop(eid)
        if self.transfers.cancel(ticket):
            self.counts.issued -= 1
        else:
            self.counts.waste(ticket.bytes)

    def _admit(self, eid: int, slot: Slot, ticket: Ticket) -> None:
        self._slot[eid] = slot
        self._tickets[eid] = ticket
        self._tick += 1
        self.policy.admitted(eid, self._tick, self.now)
        self.transfers.submit(ticket)

    def _residents(self, pool: Pool) -> list[int]:
        return [eid for eid in range(pool.part.start, pool.part.stop) if self._slot[eid] is not None]

    def _make_room(self, pool: Pool, *blocked: Any) -> Slot | None:
        if pool.free:
            return pool.free.pop()
        gone = victim(self.policy, pool.part, self.now, self._layer, *blocked)
        if gone is None:
            return None
        self._evict(pool, gone)
        return pool.free.pop()

    def _evict(self, pool: Pool, eid: int) -> None:
        """Free a slot. A copy on its way into it is taken back, or awaited when it has started."""
        slot = self._slot[eid]
        assert slot is not None
        if eid in self._fresh:
            self._waste(eid)
        if (ticket := self._tickets.pop(eid, None)) is not None and not self.transfers.cancel(ticket):
            self.transfers.settle(ticket)
        self._slot[eid] = None
        self.policy.left(eid)
        pool.free.append(slot)

    def _resize_pools(self) -> None:
        try:
            resize(self._pools, shares(self.slots, len(self._pools)), self.arena, self._make_room)
        finally:
            self.slots = len(self.arena)   # fewer than asked for, if the device ran full

    def _build_pools(self) -> None:
        """New pools and policies; residents move over in the order of their last use, as far as there is room."""
        old = sorted((eid for eid, s in enumerate(self._slot) if s is not None), key=lambda e: (-self.last_used[e], e))
        capacities = shares(self.slots, self.layers if self.scope == "layer" else 1)
        keep: list[list[int]] = [[] for _ in capacities]
        for eid in old:
            at = eid // self.experts if len(capacities) > 1 else 0
            if len(keep[at]) < capacities[at]:
                keep[at].append(eid)
        before, kept = self._pools, set().union(*keep)
        for eid in [eid for eid in old if eid not in kept]:
            self._evict(before[eid // self.experts if len(before) > 1 else 0], eid)
        spare = [slot for pool in before for slot in pool.free]
        self.policy = self.make_policy(Roster(self.layers, self.experts, hints=self.hints))
        size = self.layers * self.experts // len(keep)
        self._pools = [Pool(slice(i * size, (i + 1) * size), len(eids)) for i, eids in enumerate(keep)]
        for eid in [eid for eids in keep for eid in reversed(eids)]:
            self._tick += 1
            self.policy.admitted(eid, self._tick, self.now)
        for pool, capacity in zip(self._pools, capacities, strict=True):
            while spare and pool.capacity < capacity:
                pool.free.append(spare.pop())
                pool.capacity += 1
        for slot in spare:
            self.arena.free(slot)
        self._resize_pools()
