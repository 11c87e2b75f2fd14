"""The expert cache during computation. An expert in use cannot be evicted: a lease holds it.

All of this runs on the compute thread; copies are made by other threads. `acquire` leases the experts of a layer and
fetches the missing ones, `prefetch` fetches experts that may be needed, `release` ends a lease. A request is one
distinct expert of a layer in a pass; `core.types.Outcome` lists its outcomes.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy.typing as npt

from core.cache.cache_layout import CacheLayout
from core.cache.counts import Counts
from core.cache.lease import Lease, LeasedSegment, in_waves
from core.cache.pool import Pool
from core.cache.requests import Place
from core.cache.slot_reservation import SlotReservation
from core.memory.slot import Slot
from core.policy.eviction import Eviction
from core.policy.hints import Hints
from core.policy.predict import LayerMap, Prediction
from core.policy.predict.base import PriorityFormula, by_score
from core.types import Residence


class ExpertCache(CacheLayout):
    """The cache while layers are computed."""

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

    def acquire(self, layer: int, wanted: Sequence[int], place: Place | None = None) -> Lease:
        """Lease `wanted` (distinct experts of `layer`, at most its pool's capacity); fetch the missing ones on demand,
        but for those that `place` leaves to the host."""
        return self.requests.acquire(layer, wanted, place)

    def acquire_for_rows(self, layer: int, ids: npt.ArrayLike, wanted: Sequence[int], place: Place) -> Lease:
        """`acquire` the experts `wanted` by several tokens, of which `place` leaves so many to the host that the others
        fit. `ids` as of `in_waves`."""
        self.core.chosen(layer, ids)
        return self.acquire(layer, wanted, place)

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

    def count_hits(
        self, first: int, wanted: Sequence[Sequence[int]], ids: Sequence[Sequence[int]] | None = None
    ) -> None:
        """Count requests of layers from the `first` on: of each the experts, distinct, which native code has found in
        the slots of `hits_at`. `ids` [T][k]: what several tokens chose, in the only layer."""
        if ids is not None:
            self.core.chosen(first, ids)
        self.requests.count_hits(first, wanted)

    def prefetch(
        self,
        predictions: Sequence[Prediction],
        at: int,
        maps: Sequence[LayerMap] = (),
        priority: PriorityFormula = by_score,
        for_draft: bool = False,
    ) -> None:
        """Prefetch experts by `priority`, as long as there is a slot that holds nothing better.

        `at` = the layer in which the predictions are made, -1 before the first. Queued prefetches of earlier
        predictions are ranked again together with the new ones; one loses its slot to a better prediction, or when it
        would come too late. `maps` go to the eviction policy, too. `for_draft`: they
        are of guessed tokens, and counted as such.
        """
        self.prefetch_queue.issue(predictions, at, maps, priority, for_draft)

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

    def without_slots(self, eids: Iterable[int]) -> list[int]:
        """Those of some experts that have too few slots."""
        table, whole = self.core.table, self.core.blocks
        return [eid for eid in eids if len(table[eid]) < whole]

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

    def sample(self, layer: int, most: int) -> list[Slot]:
        """Up to `most` filled slots of a layer's experts, for trials of compute paths."""
        own = self.core.table[layer * self.experts : (layer + 1) * self.experts]
        return [slot for slots in own for slot in slots][:most]

    @property
    def has_pending_prefetches(self) -> bool:
        """Whether an expert was prefetched whose layer has not been reached since."""
        return bool(self.prefetch_queue.fresh)

    @property
    def keeps_whole(self) -> bool:
        """Whether no expert is cut to its top, so that all of them are computed as whole ones."""
        return not self.placement.tops

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
