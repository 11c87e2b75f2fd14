"""A pool of slots: one per layer, or one shared by all layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from core.errors import BudgetError
from core.memory.slot import Slot
from core.policy.predict import Guess
from core.types import Origin


class Slots(Protocol):
    """The interface to an arena: `core.memory.arena.Arena`, or a simulated one."""

    def allocate(self) -> Slot: ...
    def free(self, slot: Slot) -> None: ...
    def __len__(self) -> int: ...


class Experts(Protocol):
    """The interface to a store: `core.memory.store.Store`, or a simulated one."""

    @property
    def blob_bytes(self) -> int: ...
    def origin(self, eid: int) -> Origin: ...


@dataclass(slots=True)
class Pool:
    """`capacity` slots for the experts of `part`, `free` of them empty. Mutated by ExpertCache only."""

    part: slice  # eids
    capacity: int = 0
    free: list[Slot] = field(default_factory=list)


def fitting(guesses: Sequence[Guess], pools: Sequence[Pool], experts: int) -> dict[int, Pool]:
    """eid -> pool of the first experts of `guesses`, as many as their pool has slots: more would only evict each
    other."""
    left = [pool.capacity for pool in pools]
    found: dict[int, Pool] = {}
    for guess in guesses:
        at = guess.layer if len(pools) > 1 else 0
        if left[at]:
            left[at] -= 1
            found[guess.layer * experts + guess.expert] = pools[at]
    return found


def first(eids: Sequence[int], capacities: Sequence[int], experts: int) -> list[list[int]]:
    """The first eids that each pool has room for, in order; one pool per layer, or one for all."""
    kept: list[list[int]] = [[] for _ in capacities]
    for eid in eids:
        at = eid // experts if len(capacities) > 1 else 0
        if len(kept[at]) < capacities[at]:
            kept[at].append(eid)
    return kept


def resize(
    pools: Sequence[Pool], capacities: Sequence[int], arena: Slots, make_room: Callable[[Pool], Slot | None]
) -> None:
    """Shrink pools first, then grow others, so that the arena never exceeds the larger of its old and new sizes. Raises
    BudgetError when the device is full; the pools are then as large as there was room."""
    sizes = list(zip(pools, capacities, strict=True))
    for pool, capacity in sizes:
        while pool.capacity > capacity:
            slot = make_room(pool)
            assert slot is not None
            arena.free(slot)
            pool.capacity -= 1
    for pool, capacity in sizes:
        while pool.capacity < capacity:
            pool.free.append(_allocate(arena))
            pool.capacity += 1


def _allocate(arena: Slots) -> Slot:
    try:
        return arena.allocate()
    except RuntimeError as error:  # torch raises OutOfMemoryError, a RuntimeError, and so does its CPU allocator
        raise BudgetError(
            "The device has no memory left for the experts this budget asks for. Lower the budget, "
            f"or close what else uses the device. ({error})"
        ) from error
