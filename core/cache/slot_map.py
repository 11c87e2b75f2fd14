"""The slots and the experts in them: filled, resized, divided into pools, and checked. The only map of expert to slot.

Part of the cache; `core.cache.expert_cache` adds the operations of a layer's computation.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from core.cache.lease import Counts
from core.cache.pool import Experts, Pool, Slots, first, resize
from core.cache.prefetch_queue import PrefetchQueue
from core.memory.slot import Slot
from core.memory.ticket import Link, Ticket
from core.policy.allocation.slots import shares
from core.policy.eviction import GONE, Eviction, ExpertIndex, victim
from core.policy.hints import Hints
from core.types import Outcome, Residence


@dataclass(slots=True)
class SlotMap:
    """`slots` = how many experts the device may hold; `make_policy` builds the eviction policy."""

    layers: int
    experts: int
    arena: Slots
    store: Experts
    transfers: Link
    make_policy: Callable[[ExpertIndex], Eviction]
    scope: str
    slots: int
    now: int = 0  # forward passes so far
    phase: str = "prefill"
    counts: Counts = field(default_factory=Counts)
    divide: Callable[[int], Sequence[int]] | None = None  # total slots -> slots per layer; None: evenly
    pinned: frozenset[int] = frozenset()  # eids that are evicted only if nothing else can be
    last_used: list[int] = field(init=False)
    hints: Hints = field(init=False)  # what predictors provide to the policy
    policy: Eviction = field(init=False)
    ahead: PrefetchQueue = field(init=False)  # prefetches
    _tick: int = 0  # requests and admissions so far
    _layer: int = 0  # the layer being computed
    _slot: list[Slot | None] = field(init=False)  # eid -> slot: the map
    _pools: list[Pool] = field(init=False)
    _tickets: dict[int, Ticket] = field(default_factory=dict)  # eid -> unfinished copy
    _leased: dict[int, int] = field(default_factory=dict)  # eid -> number of leases
    _gone: int = -1  # the eid evicted last to make room

    def __post_init__(self) -> None:
        self._slot = [None] * (self.layers * self.experts)
        self.last_used = [-1] * len(self._slot)
        self.hints, self._pools = Hints(self.layers, self.experts), []
        self.ahead = PrefetchQueue(self, self.layers)
        self._build_pools()

    def reshape(
        self,
        *,
        slots: int | None = None,
        scope: str | None = None,
        make_policy: Callable[[ExpertIndex], Eviction] | None = None,
        divide: Callable[[int], Sequence[int]] | None = None,
    ) -> None:
        """Change size, scope, policy or the division into layers between two passes; keeps pinned experts first, then
        the most recently used. Raises RuntimeError while a lease is open."""
        if self._leased:
            raise RuntimeError("the cache cannot be changed while a layer is computed")
        self.slots = self.slots if slots is None else slots
        self.scope = scope or self.scope
        self.make_policy, self.divide = make_policy or self.make_policy, divide or self.divide
        if scope is None and make_policy is None:
            self._resize_pools()
        else:
            self._build_pools()

    def pin(self, eids: Collection[int]) -> None:
        """Pin these experts: evicted only if nothing else can be. Fetches missing ones at once, between two passes. The
        caller that fills `hints` informs the policy."""
        self.pinned = frozenset(eids)
        for eid in sorted(self.pinned):
            pool = self.pool(eid // self.experts)
            if self._slot[eid] is None and (slot := self._make_room(pool, self.pinned)) is not None:
                self._admit(eid, slot, ticket := self._ticket(eid, slot, True))
                self.counts.demand_bytes += ticket.bytes
        for eid in [eid for eid in self._tickets if eid in self.pinned]:
            self.transfers.wait(self._tickets[eid])
            del self._tickets[eid]

    def fill(self) -> None:
        """Fill free slots, with every layer's most often used experts first, so that a fresh cache is not empty."""
        for eid in self.hints.filling():
            pool = self.pool(eid // self.experts)
            if pool.free and self.policy.retains and self._slot[eid] is None:
                slot = pool.free.pop()
                self._admit(eid, slot, self._ticket(eid, slot, True))
        for eid in list(self._tickets):
            self.transfers.wait(self._tickets.pop(eid))
        self.transfers.forget()

    def start_over(self) -> None:
        """Reset to the state after a load, between two passes: forgets all use and fills the slots anew."""
        for pool in self._pools:
            for eid in self._residents(pool):
                self.evict(pool, eid)
        for layer in range(self.layers):
            self.hints.reached(layer)
        self.last_used = [-1] * len(self._slot)
        self.reshape(make_policy=self.make_policy)
        self.pin(self.pinned)
        self.fill()

    def clear(self) -> None:
        """Evict everything and free every slot, when the model is unloaded."""
        for pool in self._pools:
            for eid in self._residents(pool):
                self.evict(pool, eid)
            while pool.free:
                self.arena.free(pool.free.pop())

    def pool(self, layer: int) -> Pool:
        """The pool whose slots `layer` uses."""
        return self._pools[layer] if len(self._pools) > 1 else self._pools[0]

    def room(self, layer: int) -> int:
        """Slots of that pool not taken by pinned experts, at least one."""
        pool = self.pool(layer)
        inside = range(pool.part.start, pool.part.stop)
        return max(1, pool.capacity - sum(eid in inside for eid in self.pinned))

    def is_resident(self, eid: int) -> bool:
        """Whether it has a slot, its copy complete or not."""
        return self._slot[eid] is not None

    def sample(self, most: int) -> list[Slot]:
        """Up to `most` filled slots, for trials of compute paths."""
        return [slot for slot in self._slot if slot is not None][:most]

    def places(self) -> list[int]:
        """The location of each expert, by eid, as core.types.Residence. Safe to call from any thread."""
        flying = {eid for eid, ticket in self._tickets.copy().items() if not self.transfers.landed(ticket)}
        return [
            (Residence.DISK if self.store.origin(eid) == "disk" else Residence.HOST)
            if slot is None
            else Residence.IN_FLIGHT
            if eid in flying
            else Residence.RESIDENT
            for eid, slot in enumerate(self._slot)
        ]

    def check_integrity(self) -> None:
        """Raise AssertionError unless every invariant of the map holds. Call it between two passes."""
        held = {eid: slot.index for eid, slot in enumerate(self._slot) if slot is not None}
        assert len(set(held.values())) == len(held), "two experts share a slot"
        free = [slot.index for pool in self._pools for slot in pool.free]
        assert len({*free, *held.values()}) == len(free) + len(held), "a slot is free and occupied"
        assert len(free) + len(held) == len(self.arena) == self.slots, "slots, arena and budget do not add up"
        assert all(len(self._residents(p)) + len(p.free) == p.capacity for p in self._pools), "a slot was lost or found"
        assert [*held] == np.flatnonzero(self.policy.score != GONE).tolist(), "the policy and the map disagree"
        assert {*self._tickets, *self.ahead.fresh, *self._leased} <= set(held), "a copy or a lease without a slot"

    def _ticket(self, eid: int, slot: Slot, demand: bool) -> Ticket:
        return Ticket(eid, slot, self.store.blob_bytes, demand, self.phase)

    def _missed(self, eid: int) -> Outcome:
        return Outcome.MISS_DISK if self.store.origin(eid) == "disk" else Outcome.MISS

    def _admit(self, eid: int, slot: Slot, ticket: Ticket) -> None:
        self._place(eid, slot, ticket)
        self.transfers.submit(ticket)

    def _place(self, eid: int, slot: Slot, ticket: Ticket) -> None:
        self._slot[eid] = slot
        self._tickets[eid] = ticket
        self._tick += 1
        self.policy.admitted(eid, self._tick, self.now)

    def _residents(self, pool: Pool) -> list[int]:
        return [eid for eid in range(pool.part.start, pool.part.stop) if self._slot[eid] is not None]

    def _make_room(self, pool: Pool, *blocked: Any) -> Slot | None:
        if pool.free:
            return pool.free.pop()
        gone = victim(self.policy, pool.part, self.now, self._layer, *blocked, self.pinned)
        if gone is None and self.pinned:
            gone = victim(self.policy, pool.part, self.now, self._layer, *blocked)
        if gone is None:
            return None
        self._gone = gone
        self.evict(pool, gone)
        return pool.free.pop()

    def evict(self, pool: Pool, eid: int) -> None:
        """Evict `eid` and free its slot. An unfinished copy into it is cancelled, or awaited when it has started."""
        slot = self._slot[eid]
        assert slot is not None
        if eid in self.ahead.fresh:
            self.ahead.waste(eid, evicted=True)
        if (ticket := self._tickets.pop(eid, None)) is not None and not self.transfers.cancel(ticket):
            self.transfers.settle(ticket)
        self._slot[eid] = None
        self.policy.left(eid)
        pool.free.append(slot)

    def _resize_pools(self) -> None:
        try:
            resize(self._pools, self._capacities(), self.arena, self._make_room)
        finally:
            self.slots = len(self.arena)  # fewer than requested if the device ran full

    def _capacities(self) -> list[int]:
        if self.scope == "layer":
            return list(self.divide(self.slots) if self.divide is not None else shares(self.slots, self.layers))
        return [self.slots]

    def _build_pools(self) -> None:
        """Build new pools and a new policy; keeps pinned residents, then others by last use, as far as there is
        room."""
        old = sorted(
            (eid for eid, s in enumerate(self._slot) if s is not None),
            key=lambda e: (e not in self.pinned, -self.last_used[e], e),
        )
        capacities = self._capacities()
        keep = first(old, capacities, self.experts)
        before, kept = self._pools, set().union(*keep)
        for eid in [eid for eid in old if eid not in kept]:
            self.evict(before[eid // self.experts if len(before) > 1 else 0], eid)
        spare = [slot for pool in before for slot in pool.free]
        self.policy = self.make_policy(ExpertIndex(self.layers, self.experts, hints=self.hints))
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
