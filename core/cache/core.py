"""The cache mechanism over ids: what requests and prefetches do to the experts in slots (`core.cache.residents`).

Every decision follows from the requests, so with the same requests the caches of the engine, of the host tier and of
the simulator hit, miss and evict alike. `core.simulate.cache` computes the same for many caches at once.

Without transit slots a missing expert evicts another before it is computed, whatever its score. With them (the setting
bypass) it is computed in one that its pool borrows. When the leases of the layer have ended, the expert with the lowest
score gives a slot back: the newcomer itself, if all others score higher. Slots are alike, so nothing is copied for it.
One layer is computed at a time, so that all pools share the same few.

With tops shorter than experts (MoEpic section 3) the transit slots are also the prefetch buffer: the other blocks that
a layer needs go there, and so do prefetches, for which no expert is evicted. When slots are given back, the experts
that are longer than a top are cut to it, lowest score first, before any is evicted. So a layer keeps no more blocks
than its pool has, in the end the tops of as many experts as fit; and with tops as long as experts nothing is ever cut,
which is the cache of whole experts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np
import numpy.typing as npt

from core.cache.pool import Pool, S
from core.cache.residents import Residents, accept, ignore
from core.policy.eviction import GONE, MakePolicy, victim
from core.policy.hints import Hints
from core.types import Segment


class CacheCore(Residents[S]):
    """One thread at a time. A pass over a layer: `lease` its experts, `admit_requested` those that lack blocks,
    `release` all."""

    def __init__(
        self,
        layers: int,
        experts: int,
        make_policy: MakePolicy,
        pools: list[Pool[S]],
        hints: Hints | None = None,
        blocks: int = 1,
        on_loss: Callable[[int, int], None] = ignore,
    ) -> None:
        """As `Residents`; nothing is leased."""
        super().__init__(layers, experts, make_policy, pools, hints, blocks, on_loss)
        self._leases: list[Sequence[int]] = []  # the experts of each
        self._leased: frozenset[int] | None = None  # all of these, if read since they changed
        self._has_borrowed = False  # a pool may have borrowed transit slots

    def capacity_for(self, layer: int) -> int:
        """Experts of `layer` to lease at once, at least one: as many as fit into its pool with the pinned ones. Where
        only their tops stay, as many as the transit slots hold, so that a pass over many experts evicts no other's top
        to compute them; all slots if the layer keeps nothing."""
        pool, blocks, slots = self.pool(layer), self.blocks, 0
        if self.held.tops[layer] < blocks:
            slots = len(self.transit) + sum(blocks - had for had in self.held.buffered.values())
            if slots >= blocks and self.keeps(layer):
                return slots // blocks
        return max(1, (pool.capacity + slots) // blocks - sum(eid in pool.eids for eid in self.pinned))

    def chosen(self, layer: int, ids: npt.ArrayLike) -> None:
        """The T tokens of a pass choose the experts `ids` [T, k] of `layer`, negative ids none, which are requested
        next. Only for policies that count tokens; those of a single token are its requests."""
        if not self._uses.counts_tokens:
            return
        of = np.asarray(ids)
        if len(of) > 1:
            tokens = np.bincount(of[of >= 0], minlength=self.experts)
            found = tokens.nonzero()[0]
            self.policy.chosen(layer * self.experts + found, tokens[found])

    def lease(self, layer: int, eids: Sequence[int]) -> list[int]:
        """`layer` requests `eids`, all distinct: none of them can be evicted or cut until `release`, and those with all
        blocks count as used, in this order -> the missing ones, each for `admit_requested`."""
        table, blocks, buffered = self.table, self.blocks, self.held.buffered
        missing = [eid for eid in eids if len(table[eid]) < blocks]
        there = [eid for eid in eids if len(table[eid]) == blocks] if missing else eids
        for eid in [eid for eid in there if eid in buffered] if buffered else ():
            self._admit_buffered(eid)
        self._leases.append(eids)
        self._leased = None
        self.request(layer, there)
        return missing

    def request(self, first: int, *layers: Sequence[int]) -> None:
        """Each layer from the `first` on requests experts, all distinct, with all their blocks and none of them
        buffered: they count as used, in this order."""
        self.layer = first + len(layers) - 1
        for layer in range(first, first + len(layers)):
            self.hints.reached(layer)
        self.tick = self._uses.note(self.tick, self.now, *layers)

    @property
    def leased(self) -> Collection[int]:
        """The experts in use."""
        if self._leased is None:
            self._leased = frozenset().union(*self._leases)
        return self._leased

    def admit(
        self,
        eid: int,
        *blocked: Collection[int],
        in_transit: bool = False,
        may_displace: Callable[[int], bool] = accept,
    ) -> tuple[S, ...] | None:
        """Give a missing expert slots for the blocks it lacks -> these slots: free ones, borrowed transit slots if
        `in_transit`, or those of experts that are cut or that the policy evicts. These are in no container of
        `blocked`, and pinned only when there is no other. None when there are too few, or the policy would evict one
        that it may not displace."""
        had = self.table[eid]
        pool, lacks = self.pool(eid // self.experts), self.blocks - len(had)
        if in_transit and (more := lacks - len(pool.free)) > 0:
            self._borrow(pool, more)
        if not self._vacate(pool, lacks, *blocked, *([{eid}] if had else ()), may_displace=may_displace):
            return None
        slots = tuple([pool.free.pop() for _ in range(lacks)])
        self.held.complete(eid, slots)
        self.tick += 1
        if not had:
            self._uses.order.admitted(eid, self.tick, self.now)
        return slots

    def admit_requested(self, eid: int) -> tuple[S, ...] | None:
        """Admit a leased expert that lacks blocks, and count its request -> the slots; None when the leased experts
        leave too few."""
        slots = self.admit(eid, self.leased, in_transit=True)
        if slots is not None:
            self.use(eid)
        return slots

    def admit_computed(self, eid: int, *blocked: Collection[int], has_room: bool) -> tuple[S, ...] | None:
        """Count the request of an expert without slots that was computed elsewhere; where it `has_room`, give it slots:
        free ones, or those of another expert, in no container of `blocked`, that the policy ranks below it -> these
        slots, or None. After `release`; experts have one block each."""
        layer = eid // self.experts
        pool = self.pool(layer)
        self.tick += 1
        self.policy.admitted(eid, self.tick, self.now)
        self.tick = self._uses.note(self.tick, self.now, (eid,))
        if has_room and self.keeps(layer) and (pool.free or self._evict_below(eid, *blocked)):
            slots = (pool.free.pop(),)
            self.held.complete(eid, slots)
            return slots
        self.policy.left(eid)
        return None

    def use(self, eid: int) -> None:
        """Count a request of a leased expert that was admitted for it."""
        self.tick = self._uses.hold(self.tick, self.now, eid)

    def readmit(self, eid: int) -> Segment:
        """Give an expert without slots those for the blocks that its layer keeps of it, or for all blocks where the
        pool has as many for every expert. Between two passes -> these blocks, none where the layer keeps nothing."""
        pool, top = self.pool(eid // self.experts), self.held.tops[eid // self.experts]
        slots = self.admit(eid, in_transit=self.blocks > 1)
        assert slots is not None
        if not top:
            self.evict(eid)
        elif eid in self.held.long and pool.capacity < self.blocks * len(pool.eids):
            self.cut(eid)
        self._return_borrowed(pool)
        return Segment(eid, range(len(self.table[eid])))

    def buffer(self, eid: int) -> tuple[S, ...] | None:
        """Give an expert that is not leased transit slots for the blocks it lacks -> the slots. These blocks are in the
        buffer, no part of the cache, until the expert is leased; none is evicted for them. None when there are too
        few."""
        lacks = self.blocks - len(self.table[eid])
        assert lacks and eid not in self.leased, "it has all blocks already"
        if len(self.transit) < lacks:
            return None
        slots = tuple([self.transit.pop() for _ in range(lacks)])
        self.held.complete(eid, slots, buffered=True)
        return slots

    def arrive(self, layer: int, eids: Collection[int]) -> None:
        """The routing of `layer` is known: its buffered experts that are not in `eids` give their slots back."""
        low, high = layer * self.experts, (layer + 1) * self.experts
        for eid in [eid for eid in self.held.buffered if low <= eid < high and eid not in eids]:
            self.drop(eid)

    def release(self, eids: Sequence[int]) -> None:
        """End a lease of a layer: its experts may be evicted again, and are at once if the policy does not retain any,
        or the layer keeps no part of them. With the last lease, borrowed slots are given back."""
        self._leases.remove(eids)
        self._leased = None
        self._uses.settle()
        if not eids:
            return
        layer = eids[0] // self.experts
        if not self.keeps(layer):
            leased = self.leased
            for eid in [eid for eid in eids if self.table[eid] and eid not in leased and eid not in self.pinned]:
                self.evict(eid)
        if self._has_borrowed and not self._leases:
            self._return_borrowed(self.pool(layer))

    def end_leases(self) -> None:
        """End all leases, after a pass that broke off."""
        self._leases.clear()
        self._leased = None
        self._uses.settle()
        for pool in self.pools:
            self._return_borrowed(pool)

    def over_same_slots(self, make_policy: MakePolicy) -> CacheCore[S]:
        """A second core with a policy, hints, pins and time of its own over the same pools and slots. Only one of the
        two is in use at a time, and the policy of the other does not learn what it evicts. The buffer is emptied."""
        self.empty_buffer()
        other = CacheCore(self.layers, self.experts, make_policy, self.pools, blocks=self.blocks, on_loss=self._on_loss)
        other.held, other.table, other.transit = self.held, self.table, self.transit
        other.last_used[:] = self.last_used
        other.now, other.tick, other.layer = self.now, self.tick, self.layer
        return other

    def check_integrity(self) -> None:
        """Raise AssertionError unless every invariant holds. Call it between two passes."""
        self.held.check()
        sizes = self.held.sizes()
        taken = [sum(sizes.get(eid, 0) for eid in pool.eids) for pool in self.pools]
        assert all(n + len(p.free) == p.capacity for n, p in zip(taken, self.pools, strict=True)), (
            "a slot was lost or found"
        )
        assert not any(pool.borrowed for pool in self.pools), "a transit slot was not given back"
        assert sorted(sizes) == np.flatnonzero(self.policy.score != GONE).tolist(), "the policy and the map disagree"
        assert {*self.leased} <= sizes.keys(), "a lease without a slot"

    def _evict_below(self, eid: int, *blocked: Collection[int]) -> bool:
        """Evict the expert that the policy ranks lowest, unless that is `eid`."""
        part = self.pool(eid // self.experts).part
        gone = victim(self.policy, part, self.now, self.layer, *blocked, self.pinned)
        if gone is None or gone == eid:
            return False
        self.evict(gone)
        return True

    def _borrow(self, pool: Pool[S], slots: int) -> None:
        """A pool borrows that many transit slots, or as many as there are. Buffered experts give theirs up for this,
        the newest first."""
        while len(self.transit) < slots and self.held.buffered:
            self.drop(next(reversed(self.held.buffered)))
        borrowed = min(slots, len(self.transit))
        pool.free += [self.transit.pop() for _ in range(borrowed)]
        pool.borrowed += borrowed
        self._has_borrowed = True

    def _return_borrowed(self, pool: Pool[S]) -> None:
        """A pool gives borrowed slots back: free ones, then those of experts that are cut or evicted."""
        while pool.borrowed:
            if not pool.free:
                evicted = self._cut_or_evict(pool)
                assert evicted, "a transit slot was lost"
            self.transit.append(pool.free.pop())
            pool.borrowed -= 1
        self._has_borrowed = False

    def _admit_buffered(self, eid: int) -> None:
        """A buffered expert is requested: it is in the cache now, in slots that its pool borrows."""
        had = self.held.unbuffer(eid)
        self.pool(eid // self.experts).borrowed += self.blocks - had
        self._has_borrowed = True
        self.tick += 1
        if not had:
            self.policy.admitted(eid, self.tick, self.now)
