"""Which experts are in which slots, and which one is cut or evicted where others need these.

An expert consists of equal blocks, and a slot holds one of them, so that any slot of a pool serves any of its experts.
It is computed with all of them; the part that a layer keeps of it when others need slots is its top, the first of its
blocks. Nothing here knows bytes, copies or devices. A slot is any object that its owner puts into the pools: memory in
the engine (`core.memory.slot.Slot`), a row of host memory in the host tier, a number where the cache is simulated.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Generic

from core.cache.block_table import BlockTable
from core.cache.pool import Pool, S, empty_pools, first
from core.cache.use_log import UseLog
from core.policy.eviction import Eviction, ExpertIndex, MakePolicy, victim
from core.policy.eviction.base import Ints
from core.policy.hints import Hints


def ignore(eid: int, kept: int) -> None:
    """For an owner that does nothing when an expert loses slots."""


def accept(eid: int) -> bool:
    """Any expert may be evicted."""
    return True


class Residents(Generic[S]):
    """The slots of every expert, in pools and aside, and the policy that orders the experts.

    Changed by its owner between two passes: `now`, the tokens of all passes up to the coming one, and `pinned`,
    experts that are cut or evicted only if no other can be.
    """

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
        """`pools`: one per layer, or one for all. Every expert has `blocks` blocks; `on_loss(eid, kept)` is called
        before one loses the slots of those after the first `kept`."""
        self.layers, self.experts, self.blocks = layers, experts, blocks
        self.pools = pools
        self.transit: list[S] = []  # slots of no pool that none has borrowed
        self.held: BlockTable[S] = BlockTable(layers, experts, blocks)
        self.table = self.held.slots  # eid -> the slots of its blocks: the only such map
        self.hints = hints or Hints(layers, experts)
        self._uses = UseLog(make_policy(ExpertIndex(layers, experts, hints=self.hints)), layers * experts)
        self.pinned: frozenset[int] = frozenset()
        self.now = self.tick = self.layer = 0  # tick: requests and admissions so far; layer: the one being computed
        self.displaced = -1  # the expert that the last `_vacate` evicted, or -1
        self._on_loss = on_loss

    @property
    def policy(self) -> Eviction:
        """The eviction policy, with every request so far."""
        return self._uses.policy

    @property
    def last_used(self) -> Ints:
        """By eid, `now` of the last request; -1 = never."""
        return self._uses.last

    @property
    def retains(self) -> bool:
        """Whether the policy keeps experts after the step that used them."""
        return self._uses.retains

    @property
    def uses_hints(self) -> bool:
        """Whether its scores depend on `hints`."""
        return self._uses.uses_hints

    def keeps(self, layer: int) -> bool:
        """Whether experts of `layer` may stay after the step that used them."""
        return self._uses.retains and self.held.tops[layer] > 0

    def pool(self, layer: int) -> Pool[S]:
        """The pool whose slots `layer` uses."""
        return self.pools[layer] if len(self.pools) > 1 else self.pools[0]

    def residents(self, pool: Pool[S]) -> list[int]:
        """The experts that have slots of `pool`, in ascending order."""
        return [eid for eid in pool.eids if self.table[eid]]

    def is_resident(self, eid: int) -> bool:
        """Whether it has slots."""
        return bool(self.table[eid])

    def split(self, tops: Sequence[int]) -> None:
        """Keep the first `tops` blocks of experts, by layer, where others need slots: all of them, or a part, or 0 for
        none. Nothing is cut, evicted or fetched at once. Tops shorter than experts need transit slots for the other
        blocks of a token's experts. Between two passes."""
        self.held.split(tops)

    def evict(self, eid: int) -> None:
        """A resident loses its slots."""
        assert self.table[eid]
        if eid in self.held.buffered:
            self.drop(eid)
        if self.table[eid]:
            self.pool(eid // self.experts).free.extend(self._cut(eid, 0))
            self._uses.left(eid)

    def cut(self, eid: int) -> None:
        """A resident that is longer than its layer's top loses the slots of the rest."""
        assert eid in self.held.long
        layer = eid // self.experts
        self.pool(layer).free.extend(self._cut(eid, self.held.tops[layer]))

    def drop(self, eid: int) -> None:
        """The buffered blocks of an expert give their slots back; those in the cache stay."""
        self.transit.extend(self._cut(eid, self.held.buffered[eid]))

    def empty_buffer(self) -> None:
        """All buffered blocks give their slots back; blocks in the cache stay."""
        for eid in [*self.held.buffered]:
            self.drop(eid)

    def evict_all(self) -> None:
        """Every resident loses its slots."""
        for pool in self.pools:
            for eid in self.residents(pool):
                self.evict(eid)

    def forget(self) -> None:
        """Evict everything and forget all use, except what the policy remembers."""
        self.evict_all()
        self.hints.forget()
        self.last_used[:] = -1

    def resize(
        self, capacities: Sequence[int], transit: int, allocate: Callable[[int], S], free: Callable[[S], None]
    ) -> None:
        """Give each pool its capacity, and `transit` slots to none. `allocate(at)`: a slot for a pool by its number, or
        for none, -1. Shrinks first, then grows, so that there are never
        more slots than before or after. When `allocate` raises, the pools are as large as there were slots. Nothing may
        be leased."""
        sizes = list(zip(self.pools, capacities, strict=True))
        self.empty_buffer()
        while len(self.transit) > transit:
            free(self.transit.pop())
        for pool, capacity in sizes:
            while pool.capacity > capacity:
                assert self._vacate(pool, 1)
                pool.capacity -= 1
                free(pool.free.pop())
        while len(self.transit) < transit:
            self.transit.append(allocate(-1))
        for at, (pool, capacity) in enumerate(sizes):
            while pool.capacity < capacity:
                pool.grow(allocate(at))

    def rebuild(self, make_policy: MakePolicy, capacities: Sequence[int]) -> list[S]:
        """Start with another policy and other pools: pinned residents stay, then others by last use, as far as they
        fit. Pools get up to `capacities` of the slots that there are -> the slots left over."""
        self.empty_buffer()
        last = self.last_used.tolist()
        old = sorted(
            (eid for eid, slots in enumerate(self.table) if slots),
            key=lambda eid: (eid not in self.pinned, -last[eid], eid),
        )
        keep = first(old, capacities, self.experts, lambda eid: len(self.table[eid]))
        kept = set().union(*keep)
        for eid in old:
            if eid not in kept:
                self.evict(eid)
        spare = [slot for pool in self.pools for slot in pool.free]
        self._uses.policy = make_policy(ExpertIndex(self.layers, self.experts, hints=self.hints))
        self.pools = empty_pools(len(self.table), len(keep))
        for pool, eids in zip(self.pools, keep, strict=True):
            pool.capacity = sum(len(self.table[eid]) for eid in eids)
            for eid in reversed(eids):
                self.tick += 1
                self.policy.admitted(eid, self.tick, self.now)
        for pool, capacity in zip(self.pools, capacities, strict=True):
            while spare and pool.capacity < capacity:
                pool.grow(spare.pop())
        return spare

    def _vacate(
        self, pool: Pool[S], slots: int, *blocked: Collection[int], may_displace: Callable[[int], bool] = accept
    ) -> bool:
        """Have that many slots of the pool free, cutting or evicting experts if need be."""
        self.displaced = -1
        while len(pool.free) < slots:
            if not self._cut_or_evict(pool, *blocked, may_displace=may_displace):
                return False
        return True

    def _cut_or_evict(
        self, pool: Pool[S], *blocked: Collection[int], may_displace: Callable[[int], bool] = accept
    ) -> bool:
        """Of the experts in no container of `blocked`, cut the `long` one with the lowest score, or else evict the next
        by the policy, pinned ones if there is no other. False when none may be."""
        spares: tuple[Collection[int], ...] = (self.pinned, ()) if self.pinned else ((),)
        for spared in spares:
            if self.held.long and (eid := self._to_cut(pool, *blocked, spared)) is not None:
                self.cut(eid)
                return True
            gone = victim(self._uses.order, pool.part, self.now, self.layer, *blocked, spared)
            if gone is not None:
                if not may_displace(gone):
                    return False
                self.evict(gone)
                self.displaced = gone
                return True
        return False

    def _to_cut(self, pool: Pool[S], *blocked: Collection[int]) -> int | None:
        """Of the experts that can be cut, the one that the policy would evict first; None when there is none."""
        eids = [eid for eid in self.held.long if eid in pool.eids and not any(eid in some for some in blocked)]
        if not eids:
            return None
        scores = self.policy.scores(pool.part, self.now, self.layer)
        return min(eids, key=lambda eid: (scores[eid - pool.part.start], eid))

    def _cut(self, eid: int, kept: int) -> tuple[S, ...]:
        """An expert loses its blocks but the first `kept` -> their slots."""
        self._on_loss(eid, kept)
        return self.held.cut(eid, kept)
