"""Moves slots between the arena, which allocates them, and the pools of a cache."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from core.cache.core import CacheCore
from core.errors import BudgetError
from core.memory.slot import Slot


class Slots(Protocol):
    """The interface to an arena: `core.memory.arena.Arena`, or a simulated one."""

    def expect(self, count: int) -> None: ...
    def allocate(self) -> Slot: ...
    def free(self, slot: Slot) -> None: ...
    def pack(self, busy: Iterable[Slot]) -> None: ...
    def __len__(self) -> int: ...


def resize(core: CacheCore[Slot], capacities: Sequence[int], transit: int, arena: Slots) -> None:
    """Give each pool its capacity, and `transit` slots to none. Shrinks first, then grows, so that the arena never
    exceeds the larger of its old and new sizes. Raises BudgetError when the device is full; the pools are then as large
    as there was room. Nothing may be leased."""
    sizes = list(zip(core.pools, capacities, strict=True))
    core.empty_buffer()
    while len(core.transit) > transit:
        arena.free(core.transit.pop())
    for pool, capacity in sizes:
        while pool.capacity > capacity:
            arena.free(core.shrink(pool))
    while len(core.transit) < transit:
        core.transit.append(_allocate(arena))
    for pool, capacity in sizes:
        while pool.capacity < capacity:
            core.grow(pool, _allocate(arena))


def _allocate(arena: Slots) -> Slot:
    try:
        return arena.allocate()
    except RuntimeError as error:  # torch raises OutOfMemoryError, a RuntimeError, and so does its CPU allocator
        raise BudgetError(
            "The device has no memory left for the experts this budget asks for. Lower the budget, "
            f"or close what else uses the device. ({error})"
        ) from error
