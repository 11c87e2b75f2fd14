"""Figures: medians over rounds, ratios of the same round, and bounds.

A slow hour of the machine affects both sides of a pair. The bounds are those of any cache and any prefetcher: Belady's
misses on the same tokens, and the link's own speed."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

from core.memory.link import Pace
from core.profile.trace import ArrayTrace
from core.simulate import BELADY, Config, simulate


def medians(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The median of each figure over rows that have the same figures; no rows have none."""
    return {name: median(row[name] for row in rows) for name in rows[0]} if rows else {}


def ratio(some: Sequence[float], others: Sequence[float]) -> float | None:
    """The median of the rounds' own ratios; None where no round has one. Rounds whose divisor is 0 do not count."""
    values = [a / b for a, b in zip(some, others, strict=True) if b]
    return median(values) if values else None


def differences(some: Sequence[float], others: Sequence[float]) -> list[float]:
    """Of each round, what one has more than the other."""
    return [a - b for a, b in zip(some, others, strict=True)]


def spread(values: Sequence[float]) -> dict[str, float]:
    """The median, the least and the most."""
    return {"median": median(values), "least": min(values), "most": max(values)}


def belady_misses_per_token(ids: npt.NDArray[Any], experts: int, slots: int) -> float:
    """Fewest misses per token of any eviction policy on `ids` [L, T, k], each layer with its even share of `slots`. The
    first miss of each expert is left out: a cache that was filled before need not have it."""
    trace = ArrayTrace(np.ascontiguousarray(ids.transpose(1, 0, 2)), experts)
    (best,) = simulate(trace, [Config(BELADY, slots)], processes=1)
    return (best.requests - best.hits - best.compulsory) / trace.tokens


def overlapped_ms(compute_ms: float, copies: float, size_bytes: int, pace: Pace) -> float:
    """TPOT if every copy were hidden behind compute as far as the link allows: the longer of the two."""
    return max(compute_ms, copies * pace.duration_s(size_bytes) * 1e3)
