"""Does a figure grow? Slopes with their standard errors, and quantiles of waiting times."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from statistics import fmean, median

WARM_UP = 1 / 3  # share of a run that is left out: caches fill, libraries load
CERTAIN = 2.0  # standard errors
SURE = 0.001  # the least error: a value that never changes has none
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


def slope(seconds: Sequence[float], values: Sequence[float], alike: Sequence[int] = ()) -> Slope | None:
    """The median slope of all pairs (Theil and Sen), which is robust to single peaks. None for fewer than 4 points.

    `alike`: one number for each point; only points of the same number are compared, so that steps from one number to
    another are no growth. The error is that of the least-squares lines of one slope, widened for autocorrelated
    residuals (by their correlation from one point to the next), which a server's memory has.
    """
    points = thinned(seconds, values, alike or [0] * len(values))
    found = [
        (b - a) / (at - ago) for (ago, a, one), (at, b, other) in combinations(points, 2) if at > ago and one == other
    ]
    if len(points) < 4 or not found:
        return None
    middles = {
        kind: (fmean(m for m, _, of in points if of == kind), fmean(v for _, v, of in points if of == kind))
        for kind in {kind for _, _, kind in points}
    }
    beside = [(m - middles[kind][0], v - middles[kind][1]) for m, v, kind in points]
    spread = sum(m * m for m, _ in beside)
    line = sum(m * v for m, v in beside) / spread
    rest = [v - line * m for m, v in beside]
    squares = sum(r * r for r in rest)
    follows = sum(a * b for a, b in pairwise(rest)) / squares if squares else 0.0
    follows = min(0.98, max(0.0, follows))
    free = max(1, len(rest) - 1 - len(middles))
    return Slope(median(found), (squares / free / spread * (1 + follows) / (1 - follows)) ** 0.5)


def together(slopes: Iterable[Slope]) -> Slope | None:
    """The mean of several slopes, each weighted by its certainty; None for none."""
    weighted = [(one.per_minute, 1 / max(one.error, SURE) ** 2) for one in slopes]
    whole = sum(weight for _, weight in weighted)
    return Slope(sum(growth * weight for growth, weight in weighted) / whole, (1 / whole) ** 0.5) if weighted else None


def thinned(seconds: Sequence[float], values: Sequence[float], alike: Sequence[int]) -> list[tuple[float, float, int]]:
    """At most MOST points (minute, value, number): medians of neighbours, where these have the same number."""
    size = max(1, -(-len(values) // MOST))
    blocks = [slice(at, at + size) for at in range(0, len(values), size)]
    return [
        (median(seconds[block]) / 60, median(values[block]), alike[block.start])
        for block in blocks
        if len({*alike[block]}) == 1
    ]


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
