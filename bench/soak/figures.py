"""Does a figure grow? Slopes with their standard errors, and quantiles of waiting times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from statistics import fmean, median

WARM_UP = 1 / 3  # share of a run that is left out: caches fill, libraries load
CERTAIN = 2.0  # standard errors
MOST = 240  # points: the pairs of more take long and add nothing


@dataclass(frozen=True, slots=True)
class Slope:
    """Growth per minute, and its standard error."""

    per_minute: float
    error: float

    @property
    def is_growth(self) -> bool:
        """Whether noise does not explain the growth."""
        return self.per_minute > CERTAIN * self.error


def slope(seconds: Sequence[float], values: Sequence[float]) -> Slope | None:
    """The median slope of all pairs (Theil and Sen), which is robust to single peaks. None for fewer than 4 points.

    Its error is that of the least-squares line, widened for autocorrelated residuals (by their correlation from one
    point to the next), which a server's memory has.
    """
    minutes, values = [s / 60 for s in thinned(seconds)], thinned(values)
    if len(values) < 4 or minutes[0] == minutes[-1]:
        return None
    points = list(zip(minutes, values, strict=True))
    found = median((b - a) / (at - before) for (before, a), (at, b) in combinations(points, 2) if at > before)
    middle = fmean(minutes)
    spread = sum((m - middle) ** 2 for m in minutes)
    line = sum((m - middle) * v for m, v in points) / spread
    mean = fmean(values)
    rest = [v - mean - line * (m - middle) for m, v in points]
    squares = sum(r * r for r in rest)
    follows = sum(a * b for a, b in pairwise(rest)) / squares if squares else 0.0
    follows = min(0.98, max(0.0, follows))
    return Slope(found, (squares / (len(rest) - 2) / spread * (1 + follows) / (1 - follows)) ** 0.5)


def thinned(values: Sequence[float]) -> list[float]:
    """At most MOST values: medians of neighbours."""
    size = -(-len(values) // MOST)
    return [median(values[at : at + size]) for at in range(0, len(values), size)] if values else []


def after_warm_up(seconds: Sequence[float]) -> int:
    """The index of the first point that counts."""
    if not seconds:
        return 0
    begins = seconds[0] + WARM_UP * (seconds[-1] - seconds[0])
    return next(at for at, s in enumerate(seconds) if s >= begins)


def quantiles(values: Sequence[float]) -> dict[str, float]:
    """p50, p95 and max; empty for no values."""
    if not values:
        return {}
    ordered = sorted(values)
    return {"p50": at_share(ordered, 0.5), "p95": at_share(ordered, 0.95), "max": ordered[-1]}


def at_share(ordered: Sequence[float], share: float) -> float:
    """The smallest value that this share of the values does not exceed."""
    return ordered[max(0, -(-int(share * 1000) * len(ordered) // 1000) - 1)]
