"""The expert cache during computation. Leases make it impossible to evict an expert in use.

All of this runs on the compute thread; copies are made by other threads. `acquire` leases a layer's experts and fetches
the missing ones, `prefetch` fetches experts that may be needed, `release` ends a lease. A request
is one distinct expert of a layer in a pass; see `core.types.Outcome` for what can become of it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from core.cache.copies import Copies, Experts
from core.cache.core import CacheCore
from core.cache.lease import Counts, Lease, LeasedSegment
from core.cache.loan import Loan, Parts
from core.cache.pool import Pool, empty_pools
from core.cache.prefetch_buffer import PrefetchBuffer
from core.cache.slots import Slots, resize
from core.memory.slot import Slot
from core.memory.ticket import Link
from core.policy.allocation.slot_allocation import Placement
from core.policy.allocation.slots import shares
from core.policy.eviction import Eviction, MakePolicy, policy_maker
from core.policy.hints import Hints
from core.policy.predict import LayerMap, Prediction
from core.settings.cache import CacheSettings
from core.settings.prefetch import PrefetchSettings
from core.types import Residence, Segment


class ExpertCache:
    """`core` knows which expert is in which slots, `copies` the copies into slots, `prefetch_queue` the prefetches, and
    `requests` what a layer's requests become."""

    def __init__(
        self,
        layers: int,
        experts: int,
        arena: Slots,
        store: Experts,
        link: Link,
        make_policy: MakePolicy,
        scope: str,
        slots: int,
        divide: Callable[[int], Sequence[int]] | None = None,
        blocks: int = 1,
        transit: int = 0,
        split: bool = False,
    ) -> None:
        """`slots` = how many blocks the device may hold, `blocks` of each expert; `divide` = slots of all pools ->
        slots per layer, evenly if None. `transit`: of the slots, those of so many experts are set aside, see CacheCore.
        `split`: of an expert a part can be there, and what is prefetched goes into the slots set aside.
        Raises BudgetError when the device is full."""
        self.layers, self.experts = layers, experts
        self.arena, self.store, self.make_policy = arena, store, make_policy
        self.scope, self.slots, self._divide, self._transit = scope, slots, divide, transit
        self.keeps_whole = not split
        pools: list[Pool[Slot]] = empty_pools(layers * experts, layers if scope == "layer" else 1)
        core = CacheCore(
            layers, experts, make_policy, pools, on_evict=self._leaves, blocks=blocks, on_cut=self._shortens
        )
        whole = [Segment(eid, range(blocks)) for eid in range(layers * experts)]
        self.core, self.copies, self.prefetch_queue, self.requests = Parts.of(
            core, Copies(link, store, whole), split=split
        )
        self._resize()

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

    def at_rest(self, layer: int, wanted: Sequence[int]) -> list[LeasedSegment] | None:
        """`wanted` without a lease, where there is nothing to fetch or to wait for; None elsewhere. To be computed at
        once."""
        return self.requests.at_rest(layer, wanted)

    def prefetch(self, predictions: Sequence[Prediction], at: int, maps: Sequence[LayerMap] = ()) -> None:
        """Prefetch experts by priority, as long as there is a slot that holds nothing better.

        `at` = the layer in which the predictions are made, -1 before the first. Queued prefetches of earlier
        predictions are ranked again together with the new ones; one gives up its slot to a better prediction, or when
        it would come too late. `maps` are told to the eviction policy.
        """
        self.prefetch_queue.issue(predictions, at, maps)

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

    def room(self, layer: int) -> int:
        """Experts that fit into that pool beside the pinned ones, at least one."""
        return self.core.room(layer)

    def lacking(self, layer: int, wanted: Sequence[int]) -> list[int]:
        """Those of `wanted` that would have to be fetched: with too few slots, or with a copy that is only queued."""
        base, table, is_queued, whole = layer * self.experts, self.core.table, self.copies.is_queued, self.core.blocks
        return [expert for expert in wanted if len(table[base + expert]) < whole or is_queued(base + expert)]

    def availability(self, layer: int) -> tuple[list[bool], list[bool]]:
        """For each expert of `layer`: (would have to be fetched, is ready to compute). Both False: being copied."""
        base, copies, whole = layer * self.experts, self.copies, self.core.blocks
        ready = [len(slots) == whole for slots in self.core.table[base : base + self.experts]]
        missing = [not one for one in ready]
        for eid in copies.flying():
            if 0 <= eid - base < self.experts:
                ready[eid - base], missing[eid - base] = False, copies.is_queued(eid)
        return missing, ready

    def places(self) -> bytearray:
        """The location of each expert, by eid, as core.types.Residence. Safe to call from any thread; without a loop
        over the experts, as the computing thread waits for Python's lock meanwhile."""
        flying, host_resident = self.copies.flying(), self.store.host_resident()
        kinds = bytearray([Residence.PART]) * (self.core.blocks + 1)  # by the number of an expert's slots
        kinds[0], kinds[-1] = Residence.HOST if host_resident is None else Residence.DISK, Residence.RESIDENT
        held = bytearray(map(len, self.core.table))
        places = held.translate(kinds.ljust(256))
        for eid in host_resident or ():
            if not held[eid]:
                places[eid] = Residence.HOST
        for eid in flying:
            if held[eid]:
                places[eid] = Residence.IN_FLIGHT
        return places

    def sample(self, most: int) -> list[Slot]:
        """Up to `most` filled slots, for trials of compute paths."""
        return [slot for slots in self.core.table for slot in slots][:most]

    @property
    def expects(self) -> bool:
        """Whether an expert was prefetched whose layer has not been reached since."""
        return bool(self.prefetch_queue.fresh)

    @property
    def transit(self) -> int:
        """Slots set aside, which no pool has: none where all experts are resident anyway."""
        blocks = self.core.blocks
        return 0 if self.slots >= self.layers * self.experts * blocks else self._transit * blocks

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
        """What predictors and profiles tell the policy."""
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
        kept = enumerate(self.copies.settled)
        assert all(one is None or one.slots == self.core.table[eid] for eid, one in kept), "a kept lease is not its own"

    def reshape(
        self, *, slots: int | None = None, scope: str | None = None, make_policy: MakePolicy | None = None
    ) -> None:
        """Change size, scope or policy between two passes; keeps pinned experts first, then the most recently used.
        Raises RuntimeError while a lease is open."""
        if self.core.leased:
            raise RuntimeError("the cache cannot be changed while a layer is computed")
        self.slots = self.slots if slots is None else slots
        self.scope, self.make_policy = scope or self.scope, make_policy or self.make_policy
        if scope is not None or make_policy is not None:
            for slot in self.core.rebuild(self.make_policy, self._capacities()):
                self.arena.free(slot)
        self._resize()

    def configure(self, old: CacheSettings, new: CacheSettings, placed: Placement | None) -> None:
        """Use another policy, scope or placement (None: the same as before), between two passes."""
        profiled = placed is not None and not np.array_equal(placed.usual, self.core.hints.usual)
        if placed is not None:
            self.place(placed.usual, placed.pinned, placed.divide, placed.transit, placed.tops)
        if (new.eviction, new.scope) != (old.eviction, old.scope):
            self.reshape(scope=new.scope, make_policy=policy_maker(new.eviction))
        elif placed is not None:
            self.reshape()
        if profiled or new.host_eviction != old.host_eviction:
            self.store.use_policy(policy_maker(new.host_eviction), self.core.hints.usual)

    def place(
        self,
        usual: npt.ArrayLike,
        pinned: Collection[int],
        divide: Callable[[int], Sequence[int]] | None,
        transit: int = 0,
        tops: Sequence[int] = (),
    ) -> None:
        """Take over a placement: `usual` [layers * experts] = how often a profile saw each expert; `pinned` eids leave
        only if nothing else can; `divide` and `transit` as in the constructor; `tops`: blocks of an expert that each
        layer keeps, () = whole experts, which are to be computed as such. Slots and experts move with the next
        `reshape` and `pin`."""
        self.core.hints.profile(usual, sorted(pinned))
        self.core.pinned, self._divide, self._transit = frozenset(pinned), divide, transit
        self.keeps_whole = not tops
        self.core.split(tops or [self.core.blocks] * self.layers)

    def prefetch_by(self, old: PrefetchSettings | None, new: PrefetchSettings) -> None:
        """Use other rules for what is fetched ahead, between two passes. `beside` the cache it goes into the slots set
        aside, if there are any, as that of experts in several blocks always does."""
        beside = self.core.blocks > 1 or (new.beside and self._transit > 0)
        if beside == isinstance(self.prefetch_queue, PrefetchBuffer):
            self.prefetch_queue.configure(old, new)
            return
        for eid, ticket in [*self.prefetch_queue.fresh.items()]:
            if not self.prefetch_queue.take_back(ticket):
                self.prefetch_queue.waste(eid, evicted=False)
        self.core.empty_buffer()
        self.core, self.copies, self.prefetch_queue, self.requests = Parts.of(self.core, self.copies, split=beside)
        self.prefetch_queue.configure(None, new)

    def pin(self, eids: Collection[int]) -> None:
        """Pin these experts: evicted only if nothing else can be. Fetches missing ones at once, between two passes; of
        those pinned until now, the ones that would not have been kept are evicted. The caller that fills `hints`
        informs the policy."""
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
        """Whether no copy is queued or under way."""
        return self.copies.quiet()

    def set_aside(self, least: int) -> Loan:
        """Lend the slots to other passes, which leave nothing behind but what `take_back` cannot restore; only while
        the cache is `quiet`. They may use the slots of at least `least` experts of each pool, as far as it has that
        many that are not pinned."""
        assert self.quiet() and not self.core.leased, "the cache is in use"
        self._evict_failed()
        self.copies.tickets.clear()  # all landed: their experts are resident
        self.copies.settled[:] = [None] * len(self.copies.settled)  # not all of them will be
        loan = Loan(Parts(self.core, self.copies, self.prefetch_queue, self.requests), least)
        self.core, self.copies, self.prefetch_queue, self.requests = loan.lent
        return loan

    def take_back(self, loan: Loan, stop: Callable[[], bool]) -> None:
        """Restore the state before the loan. Evicted experts are fetched back, the most valuable first, until `stop()`;
        the remaining ones count as evicted. Raises the errors of copies; the cache is consistent then, too."""
        try:
            loan.fetch_back(stop)
        finally:
            self.core, self.copies, self.prefetch_queue, self.requests = loan.own
            loan.settle()

    def _leaves(self, eid: int) -> None:
        """An expert is about to be evicted: a copy into its slot is cancelled, or awaited when it has started."""
        if eid in self.prefetch_queue.fresh:
            self.prefetch_queue.waste(eid, evicted=True)
        self.copies.drop(eid)

    def _shortens(self, eid: int, kept: int) -> None:
        """An expert is about to lose its blocks but the first `kept`, which any copy that is not over is of."""
        self._leaves(eid)

    def _evict_failed(self) -> None:
        for eid in self.copies.failed():
            self.core.evict(eid)

    def _capacities(self) -> list[int]:
        slots = self.slots - self.transit
        if self.scope == "layer":
            return list(self._divide(slots) if self._divide is not None else shares(slots, self.layers))
        return [slots]

    def _resize(self) -> None:
        self.arena.expect(self.slots)
        try:
            resize(self.core, self._capacities(), self.transit, self.arena)
        finally:
            self.slots = len(self.arena)  # fewer than requested if the device ran full
        self.arena.pack(self.copies.targets())
        self.core.held.moved()
