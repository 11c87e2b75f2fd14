"""The expert cache during computation. An expert in use cannot be evicted: a lease holds it.

All of this runs on the compute thread; copies are made by other threads. `acquire` leases the experts of a layer and
fetches the missing ones, `prefetch` fetches experts that may be needed, `release` ends a lease. A request is one
distinct expert of a layer in a pass; `core.types.Outcome` lists its outcomes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from core.cache.copies import CacheMemory, Copies
from core.cache.core import CacheCore
from core.cache.counts import Counts
from core.cache.lease import Lease, LeasedSegment, in_waves
from core.cache.pool import Pool, empty_pools
from core.cache.prefetch_queue import PrefetchQueue
from core.cache.requests import Requests
from core.cache.slot_reservation import SlotReservation
from core.errors import BudgetError
from core.memory.slot import Slot
from core.policy.allocation.slot_allocation import Placement
from core.policy.eviction import Eviction, MakePolicy, policy_maker
from core.policy.hints import Hints
from core.policy.predict import LayerMap, Prediction
from core.policy.predict.base import PriorityFormula, by_score
from core.settings.cache import CacheSettings
from core.settings.prefetch import PrefetchSettings
from core.types import Residence


class ExpertCache:
    """`requests` serves the layers, with a `core` that knows which expert is in which slots, the `copies` into slots,
    and the `prefetch_queue`."""

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

    def begin_pass(self, phase: str, tokens: int) -> None:
        """A forward pass over so many tokens begins."""
        self.core.now += tokens
        self.copies.phase = phase
        self.prefetch_queue.guard.begin_pass()
        self.store.begin_pass(self.core.now)

    def arrive(self, layer: int, wanted: Sequence[int]) -> None:
        """The routing of `layer` is known: prefetches for it that are not `wanted` are cancelled or counted as
        wasted."""
        self.prefetch_queue.arrive(layer, wanted)

    def acquire(self, layer: int, wanted: Sequence[int]) -> Lease:
        """Lease `wanted` (distinct experts of `layer`, at most its pool's capacity); fetch the missing ones on
        demand."""
        return self.requests.acquire(layer, wanted)

    def in_waves(
        self,
        layer: int,
        ids: npt.ArrayLike,
        wanted: Sequence[int],
        release: Callable[[Lease], None],
        look_ahead: Callable[[], None],
    ) -> Iterator[Lease]:
        """`acquire` the experts `wanted` by several tokens, in waves if they are more than fit. `ids` [T, k]: the
        choice of each token, negative ids none. Each lease is released when the next one is taken; `look_ahead` is
        called once the last one is acquired."""
        self.core.chosen(layer, ids)
        return in_waves(self.core, layer, wanted, partial(self.acquire, layer), release, look_ahead)

    def lookup_all_hits(self, layer: int, wanted: Sequence[int]) -> list[LeasedSegment] | None:
        """`wanted` without a lease, if all of them are hits and no prefetch is pending; None otherwise. Compute them
        before the next call to the cache."""
        return self.requests.lookup_all_hits(layer, wanted)

    def hits_at(self) -> int:
        """Where native code finds the slots of experts that `lookup_all_hits` would find now: the address of their
        addresses, i64 by eid, 0 for all others. 0 = it would find none."""
        return self.requests.hits_at()

    def count_hits(self, first: int, wanted: Sequence[Sequence[int]]) -> None:
        """Count requests of layers from the `first` on: of each the experts, distinct, which native code has found in
        the slots of `hits_at`."""
        self.requests.count_hits(first, wanted)

    def prefetch(
        self,
        predictions: Sequence[Prediction],
        at: int,
        maps: Sequence[LayerMap] = (),
        priority: PriorityFormula = by_score,
    ) -> None:
        """Prefetch experts by `priority`, as long as there is a slot that holds nothing better.

        `at` = the layer in which the predictions are made, -1 before the first. Queued prefetches of earlier
        predictions are ranked again together with the new ones; one loses its slot to a better prediction, or when it
        would come too late. `maps` go to the eviction policy, too.
        """
        self.prefetch_queue.issue(predictions, at, maps, priority)

    def release(self, lease: Lease, fence: Any = None) -> None:
        """End a lease: its computation is done, or on CUDA will be at `fence`. Its experts may be evicted again."""
        self.requests.release(lease, fence)

    def abandon(self) -> None:
        """After a pass that broke off within a layer: ends all leases and evicts experts whose copy failed."""
        self._evict_failed()
        self.requests.abandon()

    def take_counts(self) -> Counts:
        """Return the counts since the last call and reset them."""
        return self.copies.take_counts()

    def is_resident(self, eid: int) -> bool:
        """Whether it has slots, their copy complete or not."""
        return self.core.is_resident(eid)

    def pool(self, layer: int) -> Pool[Slot]:
        """The pool whose slots `layer` uses."""
        return self.core.pool(layer)

    def capacity_for(self, layer: int) -> int:
        """Experts that fit into the pool of `layer` with the pinned ones, at least one."""
        return self.core.capacity_for(layer)

    def lacking(self, layer: int, wanted: Sequence[int]) -> list[int]:
        """Those of `wanted` that would have to be fetched: with too few slots, or with a copy that is only queued."""
        base, table, is_queued, whole = layer * self.experts, self.core.table, self.copies.is_queued, self.core.blocks
        return [expert for expert in wanted if len(table[base + expert]) < whole or is_queued(base + expert)]

    def availability(self, layer: int) -> tuple[list[bool], list[bool]]:
        """For each expert of `layer`: (would have to be fetched, is ready to compute). Both False: being copied."""
        base, copies, whole = layer * self.experts, self.copies, self.core.blocks
        ready = [len(slots) == whole for slots in self.core.table[base : base + self.experts]]
        missing = [not one for one in ready]
        for eid in copies.in_flight():
            if 0 <= eid - base < self.experts:
                ready[eid - base], missing[eid - base] = False, copies.is_queued(eid)
        return missing, ready

    def places(self) -> bytearray:
        """The location of each expert, by eid, as core.types.Residence. Safe to call from any thread. It loops over no
        experts, since the computing thread waits for Python's lock during the call."""
        in_flight, host_resident = self.copies.in_flight(), self.store.host_resident()
        kinds = bytearray([Residence.PART]) * (self.core.blocks + 1)  # by the number of an expert's slots
        kinds[0], kinds[-1] = Residence.HOST if host_resident is None else Residence.DISK, Residence.RESIDENT
        held = bytearray(map(len, self.core.table))
        places = held.translate(kinds.ljust(256))
        for eid in host_resident or ():
            if not held[eid]:
                places[eid] = Residence.HOST
        for eid in in_flight:
            if held[eid]:
                places[eid] = Residence.IN_FLIGHT
        return places

    def sample(self, most: int) -> list[Slot]:
        """Up to `most` filled slots, for trials of compute paths."""
        return [slot for slots in self.core.table for slot in slots][:most]

    @property
    def has_pending_prefetches(self) -> bool:
        """Whether an expert was prefetched whose layer has not been reached since."""
        return bool(self.prefetch_queue.fresh)

    @property
    def keeps_whole(self) -> bool:
        """Whether no expert is cut to its top, so that all of them are computed as whole ones."""
        return not self.placement.tops

    @property
    def transit(self) -> int:
        """Slots set aside, which no pool has."""
        return self.placement.aside(self.slots)

    @property
    def capacity(self) -> int:
        """Whole experts that the slots hold, those set aside included."""
        return self.slots // self.core.blocks

    @property
    def policy(self) -> Eviction:
        """The eviction policy."""
        return self.core.policy

    @property
    def hints(self) -> Hints:
        """The input of the policy from predictors and profiles."""
        return self.core.hints

    @property
    def counts(self) -> Counts:
        """The counts since the last `take_counts`."""
        return self.copies.counts

    def check_integrity(self) -> None:
        """Raise AssertionError unless every invariant of the cache holds. Call it between two passes."""
        self.core.check_integrity()
        held = [slot.index for slots in self.core.table for slot in slots]
        free = [slot.index for pool in self.core.pools for slot in pool.free]
        assert len({*held}) == len(held), "two blocks share a slot"
        free += [slot.index for slot in self.core.transit]
        assert len({*free, *held}) == len(free) + len(held), "a slot is free and occupied"
        assert len(free) + len(held) == len(self.arena) == self.slots, "slots, arena and budget do not add up"
        assert all(map(self.is_resident, {*self.copies.tickets, *self.prefetch_queue.fresh})), "a copy without a slot"
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

    def quiet(self) -> bool:
        """Whether no copy is queued or in flight."""
        return self.copies.quiet()

    def reserve_slots(self, least: int) -> SlotReservation:
        """Reserve slots for other passes, until `restore`; only while the cache is `quiet`. They may use the slots of
        at least `least` experts of each pool, as far as it has that many that are not pinned."""
        assert self.quiet() and not self.core.leased, "the cache is in use"
        self._evict_failed()
        self.copies.tickets.clear()  # all landed: their experts are resident
        self.copies.hits.clear()  # not all of them will be
        reservation = SlotReservation(self.requests, least)
        self.requests = reservation.borrowed
        return reservation

    def restore(self, reservation: SlotReservation, stop: Callable[[], bool]) -> None:
        """Restore the state before `reserve_slots`. Evicted experts are fetched again, those that the policy keeps
        longest first, until `stop()`; the remaining ones count as evicted. Raises the errors of copies; the cache is
        consistent then, too."""
        try:
            reservation.fetch_back(stop)
        finally:
            self.requests = reservation.own
            reservation.settle()

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
        self.arena.expect(self.slots)
        try:
            self.core.resize(self.placement.sizes(self.slots), self.transit, self._allocate, self.arena.free)
        finally:
            self.slots = len(self.arena)  # fewer than requested if the device ran full
        self.arena.pack(self.copies.targets())
        self.core.held.moved()

    def _allocate(self) -> Slot:
        try:
            return self.arena.allocate()
        except RuntimeError as error:  # torch raises OutOfMemoryError, a RuntimeError, and so does its CPU allocator
            raise BudgetError(
                "The device has no memory left for the experts this budget asks for. Lower the budget, "
                f"or close what else uses the device. ({error})"
            ) from error
