"""One pool of slots: a layer's own, or the one that all layers share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from core.errors import BudgetError
from core.memory.arena import Arena, Slot
from core.policy.predict import Guess


@dataclass(slots=True)
class Pool:
    """`capacity` slots for the experts of `part`, of which `free` hold nothing. Mutated by Residency only."""

    part: slice                     # eids
    capacity: int = 0
    free: list[Slot] = field(default_factory=list)


def fitting(guesses: Sequence[Guess], pools: Sequence[Pool], experts: int) -> dict[int, Pool]:
    """eid -> pool of the experts named first, as many as their pool has slots: more would only drive each other out."""
    left = [pool.capacity for pool in pools]
    found: dict[int, Pool] = {}
    for guess in guesses:
        at = guess.layer if len(pools) > 1 else 0
        if left[at]:
            left[at] -= 1
            found[guess.layer * experts + guess.expert] = pools[at]
    return found


def resize(pools: Sequence[Pool], capacities: Sequence[int], arena: Arena,
           make_room: Callable[[Pool], Slot | None]) -> None:
    """Shrink first, then grow, so that the arena never holds more than before or after. Raises BudgetError when the
    device is full; the pools are then as large as there was room."""
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


def _allocate(arena: Arena) -> Slot:
    try:
        return arena.allocate()
    except RuntimeError as error:  # torch raises OutOfMemoryError, a RuntimeError, and so does its CPU allocator
        raise BudgetError("The device has no memory left for the experts this budget asks for. Lower the budget, "
                          f"or close what else uses the device. ({error})") from error
