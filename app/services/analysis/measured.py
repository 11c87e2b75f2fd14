"""The clock of recorded passes: what computing, a copy and a miss took on this machine, for the simulator to go by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from core.simulate import Clock

Floats = npt.NDArray[np.float64]
LEAST = 8  # passes: fewer say nothing
DISTURBED = 2.0  # times the median: a pass that took longer had to share the machine, and says nothing
HALVINGS = 40  # of the interval in which one expert's product is sought


@dataclass(frozen=True, slots=True)
class Pass:
    """One decoded token as the engine timed it. `missed` [layers] = experts it had to wait for or copy there."""

    total_ms: float
    stall_ms: float
    missed: tuple[int, ...]
    copies_ms: tuple[float, ...]  # of each copy that ended in it
    prefetched: bool  # copies were under way before they were needed


@dataclass(frozen=True, slots=True)
class Measured:
    """A clock, how many passes it rests on, and by how much it misses their measured time per token."""

    clock: Clock
    passes: int
    error: float  # |predicted - measured| / measured of these passes


def measure(passes: Sequence[Pass], top_k: int, copy_ms: float | None = None) -> Measured | None:
    """What the passes say, or None when there are too few, or neither they nor `copy_ms` tell what a copy takes.

    compute_ms and miss_ms: the line through (misses, time that was not stall). load_ms: the median copy. expert_ms:
    that with which the clock's own stalls add up to the measured ones. Passes that a prefetch helped are left out as
    long as there are others, and so are those that took DISTURBED times the usual.
    """
    plain = [one for one in passes if not one.prefetched] or list(passes)
    usual = float(np.median([one.total_ms for one in plain])) if plain else 0.0
    plain = [one for one in plain if one.total_ms <= DISTURBED * usual]
    copies = [ms for one in passes for ms in one.copies_ms]
    load_ms = float(np.median(copies)) if copies else copy_ms
    if len(plain) < LEAST or load_ms is None:
        return None
    missed: Floats = np.array([sum(one.missed) for one in plain], np.float64)
    busy: Floats = np.array([one.total_ms - one.stall_ms for one in plain])
    miss_ms = _slope(missed, busy)
    compute_ms = max(1e-6, float(np.median(busy - miss_ms * missed)))
    layers = len(plain[0].missed)
    counts = np.bincount(np.concatenate([one.missed for one in plain]).astype(np.int64), minlength=top_k + 1)
    stall = float(np.mean([one.stall_ms for one in plain]))
    low, high = 0.0, compute_ms / (layers * top_k)

    def stalls(expert_ms: float) -> float:
        clock = Clock(compute_ms, load_ms, expert_ms, miss_ms)
        return sum(int(n) * clock.stall_ms(top_k, min(m, top_k)) for m, n in enumerate(counts)) / len(plain)

    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if stalls(middle) > stall else (low, middle)
    clock = Clock(compute_ms, load_ms, (low + high) / 2, miss_ms)
    took = float(np.mean([one.total_ms for one in plain]))
    told = compute_ms + miss_ms * float(missed.mean()) + stalls(clock.expert_ms)
    return Measured(clock, len(plain), abs(told - took) / took if took else 0.0)


def _slope(x: Floats, y: Floats) -> float:
    """Of the least-squares line; never below zero: a miss does not save time."""
    spread = float(((x - x.mean()) ** 2).sum())
    return max(0.0, float(((x - x.mean()) * (y - y.mean())).sum()) / spread) if spread else 0.0
