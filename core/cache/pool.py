"""Pools of slots: one per layer, or one shared by all layers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from core.policy.predict import Prediction

S = TypeVar("S")  # what an owner uses as a slot


@dataclass(slots=True)
class Pool(Generic[S]):
    """`capacity` slots for the experts of `part`, and `borrowed` more while a layer is computed; `free` of them empty.
    Mutated by CacheCore only."""

    part: slice  # eids
    capacity: int = 0
    borrowed: int = 0  # transit slots, see CacheCore
    free: list[S] = field(default_factory=list)

    @property
    def eids(self) -> range:
        """The experts that this pool is for."""
        return range(self.part.start, self.part.stop)

    def grow(self, slot: S) -> None:
        """Add a slot."""
        self.free.append(slot)
        self.capacity += 1


def empty_pools(total: int, count: int) -> list[Pool[S]]:
    """Pools without slots for `count` equal parts of `total` experts."""
    size = total // count
    return [Pool(slice(at * size, (at + 1) * size)) for at in range(count)]


def numbered_pools(total: int, capacities: Sequence[int]) -> list[Pool[int]]:
    """Such pools with numbers as slots, all of them free."""
    pools: list[Pool[int]] = empty_pools(total, len(capacities))
    for pool, capacity in zip(pools, capacities, strict=True):
        pool.capacity, pool.free = capacity, list(range(capacity))
    return pools


def fitting(predictions: Sequence[Prediction], capacities: Sequence[int], experts: int) -> set[int]:
    """eids of the first experts of `predictions`, as many as fit into their pool: more would only evict each other.
    `capacities`: experts per layer, or in all layers together."""
    left = [*capacities]
    found: set[int] = set()
    for prediction in predictions:
        at = prediction.layer if len(left) > 1 else 0
        if left[at]:
            left[at] -= 1
            found.add(prediction.layer * experts + prediction.expert)
    return found


def first(eids: Sequence[int], capacities: Sequence[int], experts: int, slots: Callable[[int], int]) -> list[list[int]]:
    """The first eids that fit into each pool with the `slots` of each, in order; one pool per layer, or one for all."""
    kept: list[list[int]] = [[] for _ in capacities]
    left = [*capacities]
    for eid in eids:
        at = eid // experts if len(capacities) > 1 else 0
        if slots(eid) <= left[at]:
            kept[at].append(eid)
            left[at] -= slots(eid)
    return kept
