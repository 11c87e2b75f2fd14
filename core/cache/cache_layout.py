"""The expert cache between two passes: its slots, which experts are placed and pinned in them, and its policy."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np

from core.cache.copies import CacheMemory, Copies
from core.cache.core import CacheCore
from core.cache.pool import Pool, empty_pools
from core.cache.prefetch_queue import PrefetchQueue
from core.cache.requests import Requests
from core.errors import BudgetError
from core.memory.slot import Slot
from core.policy.allocation.slot_allocation import Placement
from core.policy.eviction import MakePolicy, policy_maker
from core.settings.cache import CacheSettings
from core.settings.prefetch import PrefetchSettings


class CacheLayout:
    """`requests` serves the layers, with a `core` that knows which expert is in which slots, the `copies` into slots,
    and the `prefetch_queue`. All of this is called while no layer is computed."""

    def __init__(self, placement: Placement, slots: int, make_policy: MakePolicy, memory: CacheMemory) -> None:
        """An empty cache of so many `slots`. Prefetches go into a buffer where experts have several blocks, and evict
        otherwise, until `prefetch_by`. Raises BudgetError when the device is full."""
        self.layers, self.experts, blocks = placement.layers, placement.experts, placement.blocks
        self.placement, self.slots, self.make_policy = placement, slots, make_policy
        self.arena, self.store = memory.arena, memory.store
        total = self.layers * self.experts
        pools: list[Pool[Slot]] = empty_pools(total, self.layers if placement.scope == "layer" else 1)
        core = CacheCore(self.layers, self.experts, make_policy, pools, blocks=blocks, on_loss=self._loses_slots)
        self.requests = Requests(core, Copies(memory.link, memory.store, core.held.whole), to_buffer=blocks > 1)
        self.place(placement)
        self._resize()

    @property
    def core(self) -> CacheCore[Slot]:
        """Which expert is in which slots."""
        return self.requests.core

    @property
    def copies(self) -> Copies:
        """The copies into slots."""
        return self.requests.copies

    @property
    def prefetch_queue(self) -> PrefetchQueue:
        """The prefetches."""
        return self.requests.prefetches

    @property
    def transit(self) -> int:
        """Slots set aside, which no pool has."""
        return self.placement.aside(self.slots)

    @property
    def capacity(self) -> int:
        """Whole experts that the slots hold, those set aside included."""
        return self.slots // self.core.blocks

    def check_integrity(self) -> None:
        """Raise AssertionError unless every invariant of the cache holds. Call it between two passes."""
        self.core.check_integrity()
        held = [slot.index for slots in self.core.table for slot in slots]
        free = [slot.index for pool in self.core.pools for slot in pool.free]
        assert len({*held}) == len(held), "two blocks share a slot"
        free += [slot.index for slot in self.core.transit]
        assert len({*free, *held}) == len(free) + len(held), "a slot is free and occupied"
        assert len(free) + len(held) == len(self.arena) == self.slots, "slots, arena and budget do not add up"
        assert all(map(self.core.is_resident, {*self.copies.tickets, *self.prefetch_queue.fresh})), (
            "a copy without a slot"
        )
        kept = enumerate(self.copies.hits.leases)
        assert all(one is None or one.slots == self.core.table[eid] for eid, one in kept), "a kept lease is not its own"

    def reshape(
        self, *, slots: int | None = None, scope: str | None = None, make_policy: MakePolicy | None = None
    ) -> None:
        """Change size, scope or policy between two passes; keeps pinned experts first, then the most recently used.
        Raises RuntimeError while a lease is open."""
        if self.core.leased:
            raise RuntimeError("the cache cannot be changed while a layer is computed")
        self.slots, self.make_policy = self.slots if slots is None else slots, make_policy or self.make_policy
        self.placement = replace(self.placement, scope=scope or self.placement.scope)
        if scope is not None or make_policy is not None:
            for slot in self.core.rebuild(self.make_policy, self.placement.sizes(self.slots)):
                self.arena.free(slot)
        self._resize()

    def configure(self, old: CacheSettings, new: CacheSettings, placed: Placement | None) -> None:
        """Use another policy, scope or placement (None: the same as before), between two passes."""
        profiled = placed is not None and not np.array_equal(placed.usual, self.core.hints.usual)
        if placed is not None:
            self.place(placed)
        if (new.eviction, new.scope) != (old.eviction, old.scope):
            self.reshape(scope=new.scope, make_policy=policy_maker(new.eviction))
        elif placed is not None:
            self.reshape()
        if profiled or new.host_eviction != old.host_eviction:
            self.store.use_policy(policy_maker(new.host_eviction), self.core.hints.usual)

    def place(self, placement: Placement) -> None:
        """Use a placement. Its pinned experts are evicted only if no other can be. Slots and experts move with the next
        `reshape` and `pin`."""
        self.placement, core = placement, self.core
        core.hints.profile(placement.usual, sorted(placement.pinned))
        core.pinned = placement.pinned
        core.split(placement.tops or [core.blocks] * self.layers)

    def prefetch_by(self, old: PrefetchSettings | None, new: PrefetchSettings) -> None:
        """Use other rules for prefetches, between two passes. With the setting `beside` they go into the slots set
        aside, if there are any; those of experts in several blocks always do."""
        to_buffer = self.core.blocks > 1 or (new.beside and self.placement.transit > 0)
        if to_buffer == self.prefetch_queue.to_buffer:
            self.prefetch_queue.configure(old, new)
            return
        self.prefetch_queue.end()
        self.requests = Requests(self.core, self.copies, to_buffer=to_buffer)
        self.prefetch_queue.configure(None, new)

    def pin(self, eids: Collection[int]) -> None:
        """Pin these experts: evicted only if no other can be. Fetches missing ones at once, between two passes; of the
        experts pinned until now, those that would not have been kept are evicted. The caller that fills `hints` informs
        the policy."""
        core, copies = self.core, self.copies
        freed, core.pinned = core.pinned - {*eids}, frozenset(eids)
        for eid in freed:
            if core.is_resident(eid) and not core.keeps(eid // self.experts):
                core.evict(eid)
        for eid in sorted(core.pinned):
            if not core.is_resident(eid) and (slots := core.admit(eid, core.pinned)) is not None:
                copies.counts.demand_bytes += copies.demand(copies.whole[eid], slots).bytes
        for eid in [eid for eid in copies.tickets if eid in core.pinned]:
            copies.wait(eid)

    @contextmanager
    def pinning(self, eids: Collection[int]) -> Iterator[None]:
        """Inside, between two passes and in some, these experts are pinned too."""
        own = self.core.pinned
        self.pin(own | {*eids})
        try:
            yield
        finally:
            self.pin(own)

    def fill(self) -> None:
        """Fill free slots, with every layer's most often used experts first, so that a fresh cache is not empty."""
        core, copies, tops = self.core, self.copies, self.core.held.tops
        for eid in core.hints.filling():
            has_room = len(core.pool(eid // self.experts).free) >= max(1, tops[eid // self.experts])
            if core.policy.retains and has_room and not core.is_resident(eid) and (found := core.readmit(eid)).blocks:
                copies.demand(found, core.table[eid])
        for eid in list(copies.tickets):
            copies.wait(eid)
        copies.link.forget()
        for eid in range(len(core.table)):
            self.requests.expect_hit(eid)

    def start_over(self) -> None:
        """Reset to the state after a load, between two passes: forgets all use and fills the slots anew."""
        self.core.forget()
        self.prefetch_queue.guard.forget()
        self.reshape(make_policy=self.make_policy)
        self.pin(self.core.pinned)
        self.fill()

    def clear(self) -> None:
        """Evict everything and free every slot, when the model is unloaded."""
        self.core.evict_all()
        for pool in self.core.pools:
            while pool.free:
                self.arena.free(pool.free.pop())
        while self.core.transit:
            self.arena.free(self.core.transit.pop())

    def _loses_slots(self, eid: int, kept: int) -> None:
        """An expert is about to lose the slots of its blocks after the first `kept`: a copy into them is cancelled, or
        awaited when it has started. A copy that has not ended is never into the first ones."""
        requests = self.requests
        if eid in requests.prefetches.fresh:
            requests.prefetches.waste(eid, evicted=True)
        requests.copies.drop(eid)

    def _evict_failed(self) -> None:
        for eid in self.copies.failed():
            self.core.evict(eid)

    def _resize(self) -> None:
        by_layer = self.placement.scope == "layer" and not self.placement.transit and self.core.blocks == 1
        if self.arena.expect(self.slots, by_layer):
            self._fit()
        try:
            self.core.resize(self.placement.sizes(self.slots), self.transit, self._allocate, self.arena.free)
        finally:
            self.slots = len(self.arena)  # fewer than requested if the device ran full
        self.arena.pack(self.copies.settle)
        self.core.held.moved()

    def _fit(self) -> None:
        """Give every slot the size that its pool's have, with what it holds."""
        core, copies, fits = self.core, self.copies, self.arena.fits
        for at, pool in [*enumerate(core.pools)]:
            for eid in core.residents(pool):
                if not all(fits(slot, at) for slot in core.table[eid]):
                    copies.wait(eid)
                    copies.hits.drop(eid)
            held = [slot for eid in core.residents(pool) for slot in core.table[eid]]
            for slot in [one for one in (*pool.free, *held) if not fits(one, at)]:
                self.arena.fit(slot, at)
        for slot in [one for one in core.transit if not fits(one, -1)]:
            self.arena.fit(slot, -1)

    def _allocate(self, at: int) -> Slot:
        try:
            return self.arena.allocate(at)
        except RuntimeError as error:  # torch raises OutOfMemoryError, a RuntimeError, and so does its CPU allocator
            raise BudgetError(
                "The device has no memory left for the experts this budget asks for. Lower the budget, "
                f"or close what else uses the device. ({error})"
            ) from error
