"""Division of slots into pools, and of experts into waves when more are needed than fit. Numbers only."""

from __future__ import annotations

from collections.abc import Callable, Sequence

WAVES = 8  # groups that a pool holds at once


def shares(slots: int, pools: int) -> list[int]:
    """Split `slots` over `pools` as evenly as whole slots allow, earlier pools first."""
    return [slots // pools + (1 if i < slots % pools else 0) for i in range(pools)]


def waves(wanted: Sequence[int], capacity: int, is_resident: Callable[[int], bool]) -> list[list[int]]:
    """Split experts of one layer into groups that fit a pool: while one group is computed, later ones are copied.

    One group when all fit; else small ones, so that the slots of what was computed are soon there for the next copies.
    Residents come first, so that none is evicted before its use.
    """
    if len(wanted) <= capacity:
        return [list(wanted)]
    size = max(1, capacity // WAVES)
    ordered = sorted(wanted, key=lambda expert: not is_resident(expert))
    return [ordered[i : i + size] for i in range(0, len(ordered), size)]
