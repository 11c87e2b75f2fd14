"""The cache mechanism over ids: which expert is in which slots, which are in use, and which one leaves for another.

An expert consists of equal blocks, and a slot holds one of them, so that any slot of a pool serves any of its experts.
The core knows no bytes, copies or devices. A slot is whatever its owner puts into the pools: memory in the engine
(`core.memory.slot.Slot`), a row of host memory in the host tier, a number where the cache is only simulated. Every
decision follows from the requests, so with the same requests all of these hit, miss and evict alike.
`core.simulate.cache` computes the same for many caches at once.

Without transit slots a missing expert displaces another before it is computed, whatever it is worth. With them (the
setting bypass) it is computed in one that its pool is lent, and the slot is given back when the layer's leases have
ended, by the expert that is worth least then: the newcomer itself, if all others are worth more. Slots are alike, so
nothing is copied for it. One layer is computed at a time, so that all pools share the same few.
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


def _any(eid: int) -> bool:
    return True


class CacheCore(Generic[S]):
    """One thread at a time. A pass over a layer: `lease` its experts, `admit` those missing, `release` them all.

    Changed by its owner between two passes: `now`, the tokens of all passes up to the coming one, and `pinned`,
    experts that leave only if nothing else can.
    """

    def __init__(
        self,
        layers: int,
        experts: int,
        make_policy: MakePolicy,
        pools: list[Pool[S]],
        hints: Hints | None = None,
        on_evict: Callable[[int], None] = _ignore,
        blocks: int = 1,
    ) -> None:
        """`pools`: one per layer, or one for all. `on_evict(eid)` is called before an expert loses its slots; every
        expert has `blocks` blocks."""
        self.layers, self.experts, self.blocks = layers, experts, blocks
        self.pools = pools
        self.transit: list[S] = []  # slots of no pool that are not lent to one
        self.table: list[tuple[S, ...]] = [()] * (layers * experts)  # eid -> the slots of its blocks: the only such map
        self.hints = hints or Hints(layers, experts)
        self.policy = make_policy(ExpertIndex(layers, experts, hints=self.hints))
        self.pinned: frozenset[int] = frozenset()
        self.leased: dict[int, int] = {}  # eid -> number of leases
        self.last_used = [-1] * len(self.table)  # `now` of the last request
        self.now = self.tick = self.layer = 0  # tick: requests and admissions so far; layer: the one being computed
        self.displaced = -1  # the expert that the last `admit` evicted, or -1
        self._on_evict = on_evict

    def pool(self, layer: int) -> Pool[S]:
        """The pool whose slots `layer` uses."""
        return self.pools[layer] if len(self.pools) > 1 else self.pools[0]

    def room(self, layer: int) -> int:
        """Experts that fit into that pool beside the pinned ones, at least one."""
        pool = self.pool(layer)
        return max(1, pool.capacity // self.blocks - sum(eid in pool.eids for eid in self.pinned))

    def residents(self, pool: Pool[S]) -> list[int]:
        """The experts that have slots of `pool`, in ascending order."""
        return [eid for eid in pool.eids if self.table[eid]]

    def is_resident(self, eid: int) -> bool:
        """Whether it has slots."""
        return bool(self.table[eid])

    def lease(self, layer: int, eids: Iterable[int]) -> list[int]:
        """`layer` requests `eids`, all distinct: none of them can be evicted until `release`, and residents count as
        used, in this order -> those missing, each to be admitted."""
        table, leased, used, last_used = self.table, self.leased, self.policy.used, self.last_used
        now, tick = self.now, self.tick
        self.layer = layer
        self.hints.reached(layer)
        missing: list[int] = []
        for eid in eids:
            leased[eid] = leased.get(eid, 0) + 1
            if not table[eid]:
                missing.append(eid)
                continue
            tick += 1
            used(eid, tick, now)
            last_used[eid] = now
        self.tick = tick
        return missing

    def admit(
        self,
        eid: int,
        *blocked: Collection[int],
        in_transit: bool = False,
        may_displace: Callable[[int], bool] = _any,
    ) -> tuple[S, ...] | None:
        """Give a missing expert slots, one per block: free ones, if it may be `in_transit` those that its pool is lent,
        or those of the expert which the policy evicts among those in no container of `blocked`, a pinned one only when
        there is no other. None when there are too few, or that expert is one which it may not displace."""
        pool = self.pool(eid // self.experts)
        if in_transit and len(pool.free) < self.blocks <= len(self.transit):
            pool.free += [self.transit.pop() for _ in range(self.blocks)]
            pool.lent += self.blocks
        if not self._vacate(pool, self.blocks, *blocked, may_displace=may_displace):
            return None
        self.table[eid] = slots = tuple([pool.free.pop() for _ in range(self.blocks)])
        self.tick += 1
        self.policy.admitted(eid, self.tick, self.now)
        return slots

    def use(self, eid: int) -> None:
        """Count a request of an expert that was admitted for it."""
        self.tick += 1
        self.policy.used(eid, self.tick, self.now)
        self.last_used[eid] = self.now

    def release(self, eids: Sequence[int]) -> None:
        """End a lease of a layer: its experts may be evicted again, and are at once if the policy does not retain any.
        With the last lease, lent slots are taken back."""
        leased, retains = self.leased, self.policy.retains
        for eid in eids:
            others = leased.pop(eid) - 1
            if others:
                leased[eid] = others
            elif not retains and eid not in self.pinned and self.table[eid]:
                self.evict(eid)
        if eids and not leased:
            self._take_back(self.pool(eids[0] // self.experts))

    def end_leases(self) -> None:
        """End all leases, after a pass that broke off."""
        self.leased.clear()
        for pool in self.pools:
            self._take_back(pool)

    def evict(self, eid: int) -> None:
        """A resident loses its slots."""
        slots = self.table[eid]
        assert slots
        self._on_evict(eid)
        self.table[eid] = ()
        self.policy.left(eid)
        self.pool(eid // self.experts).free.extend(slots)

    def evict_all(self) -> None:
        """Every resident loses its slots."""
        for pool in self.pools:
            for eid in self.residents(pool):
                self.evict(eid)

    def forget(self) -> None:
        """Evict everything and forget all use, except what the policy remembers."""
        self.evict_all()
        self.hints.forget()
        self.last_used = [-1] * len(self.table)

    def shrink(self, pool: Pool[S]) -> S:
        """Take a slot out of a pool, if none is free one of the next victim's. Nothing may be leased."""
        assert self._vacate(pool, 1)
        pool.capacity -= 1
        return pool.free.pop()

    def grow(self, pool: Pool[S], slot: S) -> None:
        """Add a slot to a pool."""
        pool.free.append(slot)
        pool.capacity += 1

    def rebuild(self, make_policy: MakePolicy, capacities: Sequence[int]) -> list[S]:
        """Begin anew with another policy and other pools: pinned residents stay, then others by last use, as far as
        there is room. Pools get up to `capacities` slots of those that there are -> the slots left over."""
        old = sorted(
            (eid for eid, slots in enumerate(self.table) if slots),
            key=lambda eid: (eid not in self.pinned, -self.last_used[eid], eid),
        )
        keep = first(old, [capacity // self.blocks for capacity in capacities], self.experts)
        kept = set().union(*keep)
        for eid in old:
            if eid not in kept:
                self.evict(eid)
        spare = [slot for pool in self.pools for slot in pool.free]
        self.policy = make_policy(ExpertIndex(self.layers, self.experts, hints=self.hints))
        self.pools = empty_pools(len(self.table), len(keep))
        for pool, eids in zip(self.pools, keep, strict=True):
            pool.capacity = len(eids) * self.blocks
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
        other = CacheCore(
            self.layers, self.experts, make_policy, self.pools, on_evict=self._on_evict, blocks=self.blocks
        )
        other.table, other.transit, other.last_used = self.table, self.transit, self.last_used[:]
        other.now, other.tick, other.layer = self.now, self.tick, self.layer
        return other

    def check_integrity(self) -> None:
        """Raise AssertionError unless every invariant holds. Call it between two passes."""
        held = [eid for eid, slots in enumerate(self.table) if slots]
        assert all(len(self.table[eid]) == self.blocks for eid in held), "an expert without all of its blocks"
        taken = [len(self.residents(pool)) * self.blocks for pool in self.pools]
        assert all(n + len(p.free) == p.capacity for n, p in zip(taken, self.pools, strict=True)), (
            "a slot was lost or found"
        )
        assert not any(pool.lent for pool in self.pools), "a transit slot was not given back"
        assert held == np.flatnonzero(self.policy.score != GONE).tolist(), "the policy and the map disagree"
        assert self.leased.keys() <= set(held), "a lease without a slot"

    def _vacate(
        self, pool: Pool[S], slots: int, *blocked: Collection[int], may_displace: Callable[[int], bool] = _any
    ) -> bool:
        """Have that many slots of the pool free, evicting an expert if need be; at most as many as one has."""
        self.displaced = -1
        if len(pool.free) >= slots:
            return True
        gone = self._victim(pool, *blocked)
        if gone is None or not may_displace(gone):
            return False
        self.evict(gone)
        self.displaced = gone
        return True

    def _take_back(self, pool: Pool[S]) -> None:
        """Take lent slots back: free ones, then those of the experts that the policy evicts."""
        while pool.lent:
            if not pool.free:
                gone = self._victim(pool)
                assert gone is not None, "a transit slot was lost"
                self.evict(gone)
            self.transit.append(pool.free.pop())
            pool.lent -= 1

    def _victim(self, pool: Pool[S], *blocked: Collection[int]) -> int | None:
        """Whom the policy evicts next among those in no container of `blocked`; a pinned expert if there is no
        other."""
        gone = victim(self.policy, pool.part, self.now, self.layer, *blocked, self.pinned)
        if gone is None and self.pinned:
            gone = victim(self.policy, pool.part, self.now, self.layer, *blocked)
        return gone
