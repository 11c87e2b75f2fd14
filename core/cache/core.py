"""The cache mechanism over ids: which expert is in which slot, which are in use, and which one leaves for another.

It knows no bytes, copies or devices. A slot is whatever its owner puts into the pools: memory in the engine
(`core.memory.slot.Slot`), a row of host memory in the host tier, a number where the cache is only simulated. Every
decision follows from the requests, so with the same requests all of these hit, miss and evict alike.
`core.simulate.cache` computes the same for many caches at once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Generic

import numpy as np

from core.cache.pool import Pool, S, empty_pools, first
from core.policy.eviction import GONE, ExpertIndex, MakePolicy, victim
from core.policy.hints import Hints


def _ignore(eid: int) -> None:
    pass


class CacheCore(Generic[S]):
    """One thread at a time. A pass over a layer: `lease` its experts, `admit` those missing, `release` them all.

    Changed by its owner between two passes: `now`, the number of the pass, and `pinned`, experts that leave only if
    nothing else can.
    """

    def __init__(
        self,
        layers: int,
        experts: int,
        make_policy: MakePolicy,
        pools: list[Pool[S]],
        hints: Hints | None = None,
        on_evict: Callable[[int], None] = _ignore,
    ) -> None:
        """`pools`: one per layer, or one for all. `on_evict(eid)` is called before an expert loses its slot."""
        self.layers, self.experts = layers, experts
        self.pools = pools
        self.slot: list[S | None] = [None] * (layers * experts)  # eid -> its slot: the only such map
        self.hints = hints or Hints(layers, experts)
        self.policy = make_policy(ExpertIndex(layers, experts, hints=self.hints))
        self.pinned: frozenset[int] = frozenset()
        self.leased: dict[int, int] = {}  # eid -> number of leases
        self.last_used = [-1] * len(self.slot)  # `now` of the last request
        self.now = self.tick = self.layer = 0  # tick: requests and admissions so far; layer: the one being computed
        self.displaced = -1  # the expert that the last `admit` evicted, or -1
        self._on_evict = on_evict

    def pool(self, layer: int) -> Pool[S]:
        """The pool whose slots `layer` uses."""
        return self.pools[layer] if len(self.pools) > 1 else self.pools[0]

    def room(self, layer: int) -> int:
        """Slots of that pool not taken by pinned experts, at least one."""
        pool = self.pool(layer)
        return max(1, pool.capacity - sum(eid in pool.eids for eid in self.pinned))

    def residents(self, pool: Pool[S]) -> list[int]:
        """The experts that have slots of `pool`, in ascending order."""
        return [eid for eid in pool.eids if self.slot[eid] is not None]

    def is_resident(self, eid: int) -> bool:
        """Whether it has a slot."""
        return self.slot[eid] is not None

    def lease(self, layer: int, eids: Iterable[int]) -> list[int]:
        """`layer` requests `eids`, all distinct: none of them can be evicted until `release`, and residents count as
        used, in this order -> those missing, each to be admitted."""
        slot, leased, used, last_used = self.slot, self.leased, self.policy.used, self.last_used
        now, tick = self.now, self.tick
        self.layer = layer
        self.hints.reached(layer)
        missing: list[int] = []
        for eid in eids:
            leased[eid] = leased.get(eid, 0) + 1
            if slot[eid] is None:
                missing.append(eid)
                continue
            tick += 1
            used(eid, tick, now)
            last_used[eid] = now
        self.tick = tick
        return missing

    def admit(self, eid: int, *blocked: Collection[int]) -> S | None:
        """Give a missing expert a slot: a free one, or that of the expert which the policy evicts among those in no
        container of `blocked`, a pinned one only when there is no other. None when there is none at all."""
        pool = self.pool(eid // self.experts)
        slot = self._vacant(pool, *blocked)
        if slot is not None:
            self.slot[eid] = slot
            self.tick += 1
            self.policy.admitted(eid, self.tick, self.now)
        return slot

    def use(self, eid: int) -> None:
        """Count a request of an expert that was admitted for it."""
        self.tick += 1
        self.policy.used(eid, self.tick, self.now)
        self.last_used[eid] = self.now

    def release(self, eids: Iterable[int]) -> None:
        """End a lease: its experts may be evicted again, and are at once if the policy does not retain any."""
        for eid in eids:
            self.leased[eid] -= 1
            if not self.leased[eid]:
                del self.leased[eid]
                if not self.policy.retains and eid not in self.pinned and self.slot[eid] is not None:
                    self.evict(eid)

    def evict(self, eid: int) -> None:
        """A resident loses its slot."""
        slot = self.slot[eid]
        assert slot is not None
        self._on_evict(eid)
        self.slot[eid] = None
        self.policy.left(eid)
        self.pool(eid // self.experts).free.append(slot)

    def evict_all(self) -> None:
        """Every resident loses its slot."""
        for pool in self.pools:
            for eid in self.residents(pool):
                self.evict(eid)

    def forget(self) -> None:
        """Evict everything and forget all use, except what the policy remembers."""
        self.evict_all()
        for layer in range(self.layers):
            self.hints.reached(layer)
        self.last_used = [-1] * len(self.slot)

    def shrink(self, pool: Pool[S]) -> S:
        """Take a slot out of a pool, if none is free that of the next victim. Nothing may be leased."""
        slot = self._vacant(pool)
        assert slot is not None
        pool.capacity -= 1
        return slot

    def grow(self, pool: Pool[S], slot: S) -> None:
        """Add a slot to a pool."""
        pool.free.append(slot)
        pool.capacity += 1

    def rebuild(self, make_policy: MakePolicy, capacities: Sequence[int]) -> list[S]:
        """Begin anew with another policy and other pools: pinned residents stay, then others by last use, as far as
        there is room. Pools get up to `capacities` slots of those that there are -> the slots left over."""
        old = sorted(
            (eid for eid, slot in enumerate(self.slot) if slot is not None),
            key=lambda eid: (eid not in self.pinned, -self.last_used[eid], eid),
        )
        keep = first(old, capacities, self.experts)
        kept = set().union(*keep)
        for eid in old:
            if eid not in kept:
                self.evict(eid)
        spare = [slot for pool in self.pools for slot in pool.free]
        self.policy = make_policy(ExpertIndex(self.layers, self.experts, hints=self.hints))
        self.pools = empty_pools(len(self.slot), len(keep))
        for pool, eids in zip(self.pools, keep, strict=True):
            pool.capacity = len(eids)
            for eid in reversed(eids):
                self.tick += 1
                self.policy.admitted(eid, self.tick, self.now)
        for pool, capacity in zip(self.pools, capacities, strict=True):
            while spare and pool.capacity < capacity:
                self.grow(pool, spare.pop())
        return spare

    def over_same_slots(self, make_policy: MakePolicy) -> CacheCore[S]:
        """A second core with a policy, hints, pins and time of its own over the same pools and slots. Only one of the
        two is in use at a time; what it evicts, the other must be told."""
        other = CacheCore(self.layers, self.experts, make_policy, self.pools, on_evict=self._on_evict)
        other.slot, other.last_used = self.slot, self.last_used[:]
        other.now, other.tick, other.layer = self.now, self.tick, self.layer
        return other

    def check_integrity(self) -> None:
        """Raise AssertionError unless every invariant holds. Call it between two passes."""
        held = [eid for eid, slot in enumerate(self.slot) if slot is not None]
        assert all(len(self.residents(p)) + len(p.free) == p.capacity for p in self.pools), "a slot was lost or found"
        assert held == np.flatnonzero(self.policy.score != GONE).tolist(), "the policy and the map disagree"
        assert self.leased.keys() <= set(held), "a lease without a slot"

    def _vacant(self, pool: Pool[S], *blocked: Collection[int]) -> S | None:
        """A slot of the pool that is free, or is made so."""
        self.displaced = -1
        if pool.free:
            return pool.free.pop()
        gone = victim(self.policy, pool.part, self.now, self.layer, *blocked, self.pinned)
        if gone is None and self.pinned:
            gone = victim(self.policy, pool.part, self.now, self.layer, *blocked)
        if gone is None:
            return None
        self.evict(gone)
        self.displaced = gone
        return pool.free.pop()
