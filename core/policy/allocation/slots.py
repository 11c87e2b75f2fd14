"""How slots are split over pools, and how more experts than fit pass through a pool. Numbers only."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def shares(slots: int, pools: int) -> list[int]:
    """Split `slots` over `pools` as evenly as whole slots allow, earlier pools first."""
    return [slots // pools + (1 if i < slots % pools else 0) for i in range(pools)]


def waves(wanted: Sequence[int], capacity: int, is_resident: Callable[[int], bool]) -> list[list[int]]:
    """Experts of one layer in groups that a pool can hold, the next one's copies beside the computing of this one.

    One group when all fit; else groups of half the pool, residents first so that none is evicted before its use.
    """
    if len(wanted) <= capacity:
        return [list(wanted)]
    size = max(1, capacity // 2)
    ordered = sorted(wanted, key=lambda expert: not is_resident(expert))
    return [ordered[i : i + size] for i in range(0, len(ordered), size)]
