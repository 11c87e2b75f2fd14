"""Fits the simulator's clock to recorded passes: times of computing, an expert copy and a miss on this machine."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from core.simulate import Clock

Floats = npt.NDArray[np.float64]
LEAST = 8  # fewest passes for a fit
DISTURBED = 2.0  # times the median; slower passes shared the machine and are left out
HALVINGS = 40  # bisection steps of the search for a time
AMISS = 0.01  # of the time per token: the clock's stalls may be so far from the measured ones
MOST = 8.0  # times a copy's own duration; more is not looked for


@dataclass(frozen=True, slots=True)
class Pass:
    """One decoded token as timed by the engine. `missed` [layers] = experts that were waited for or copied in that
    layer."""

    total_ms: float
    stall_ms: float
    missed: tuple[int, ...]
    copies_ms: tuple[float, ...]  # of each copy that ended in this pass
    prefetched: bool  # copies had started before they were needed


@dataclass(frozen=True, slots=True)
class Measured:
    """A clock, the number of passes behind it, and its relative error against their measured time per token."""

    clock: Clock
    passes: int
    error: float  # |predicted - measured| / measured of these passes
    predicted_ms: float = 0.0  # per token, of these passes


def measure(passes: Sequence[Pass], top_k: int, copy_ms: float | None = None) -> Measured | None:
    """Fit a clock; None with too few passes, or when neither they nor `copy_ms` give the time of a copy.

    compute_ms and miss_ms: the line through (misses, time that was not stall). load_ms: the median copy. expert_ms: the
    value for which the clock's stalls sum to the measured ones; where there is none, as several threads copy at once or
    copies wait for one another, load_ms is what a copy adds to a stall instead. Passes that benefited from a prefetch
    are left out while others exist, and so are those slower than DISTURBED times the median."""
    plain = [one for one in passes if not one.prefetched] or list(passes)
    usual = float(np.median([one.total_ms for one in plain])) if plain else 0.0
    plain = [one for one in plain if one.total_ms <= DISTURBED * usual]
    copies = [ms for one in passes for ms in one.copies_ms]
    known_ms = float(np.median(copies)) if copies else copy_ms
    if len(plain) < LEAST or known_ms is None:
        return None
    load_ms: float = known_ms
    missed: Floats = np.array([sum(one.missed) for one in plain], np.float64)
    busy: Floats = np.array([one.total_ms - one.stall_ms for one in plain])
    miss_ms = _slope(missed, busy)
    compute_ms = max(1e-6, float(np.median(busy - miss_ms * missed)))
    layers = len(plain[0].missed)
    counts = np.bincount(np.concatenate([one.missed for one in plain]).astype(np.int64), minlength=top_k + 1)
    stall = float(np.mean([one.stall_ms for one in plain]))

    def stalls(expert_ms: float, load_ms: float) -> float:
        clock = Clock(compute_ms, load_ms, expert_ms, miss_ms)
        return sum(int(n) * clock.stall_ms(top_k, min(m, top_k)) for m, n in enumerate(counts)) / len(plain)

    expert_ms = _where(lambda ms: stall - stalls(ms, load_ms), compute_ms / (layers * top_k))
    if missed.any() and abs(stalls(expert_ms, load_ms) - stall) > AMISS * (compute_ms + stall):
        load_ms = _where(lambda ms: stalls(expert_ms, ms) - stall, MOST * load_ms)
    clock = Clock(compute_ms, load_ms, expert_ms, miss_ms)
    took = float(np.mean([one.total_ms for one in plain]))
    predicted_ms = compute_ms + miss_ms * float(missed.mean()) + stalls(expert_ms, load_ms)
    return Measured(clock, len(plain), abs(predicted_ms - took) / took if took else 0.0, predicted_ms)


def _where(rising: Callable[[float], float], high: float) -> float:
    """Where a rising function crosses 0 between 0 and `high`; the end nearer to it where it does not."""
    low = 0.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < 0 else (low, middle)
    return (low + high) / 2


def _slope(x: Floats, y: Floats) -> float:
    """Slope of the least-squares line, at least 0: a miss does not save time."""
    spread = float(((x - x.mean()) ** 2).sum())
    return max(0.0, float(((x - x.mean()) * (y - y.mean())).sum()) / spread) if spread else 0.0
