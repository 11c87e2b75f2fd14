"""How sure a share of some tokens is, and what may be said of it: the one rule behind every agreement that is shown.

The interval is Wilson's (E. B. Wilson, "Probable inference, the law of succession, and statistical inference", JASA
22, 1927), which L. D. Brown, T. T. Cai and A. DasGupta ("Interval estimation for a binomial proportion", Statistical
Science 16, 2001) recommend for few observations and for shares near 0 or 1. It takes tokens as independent; those of
one answer are not quite, so the true interval is somewhat wider.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

Z = 1.959964  # standard errors on either side of 95 % of a normal distribution
CLOSE = 0.9  # agreement from which an answer counts as close to the exact model's
Verdict = Literal["close", "low", "unclear"]


@dataclass(frozen=True, slots=True)
class Share:
    """A share of `n` tokens with its 95 % interval."""

    hits: int
    n: int
    low: float
    high: float

    @property
    def value(self) -> float:
        return self.hits / self.n

    @property
    def verdict(self) -> Verdict:
        """Whether the whole interval is at least CLOSE, or all below it. "unclear": too few tokens to tell."""
        return "close" if self.low >= CLOSE else "low" if self.high < CLOSE else "unclear"


def share_of(hits: int, n: int) -> Share | None:
    """The share and its Wilson interval; None of no tokens."""
    if n <= 0:
        return None
    p, square = hits / n, Z * Z
    middle, half = p + square / (2 * n), Z * math.sqrt(p * (1 - p) / n + square / (4 * n * n))
    whole = 1 + square / n
    low = 0.0 if hits == 0 else (middle - half) / whole
    return Share(hits, n, max(0.0, low), 1.0 if hits == n else min(1.0, (middle + half) / whole))


def mean_error(values: Sequence[float]) -> tuple[float, float]:
    """The mean of some values, and its standard error; infinite for fewer than two."""
    n = len(values)
    mean = math.fsum(values) / n if n else math.nan
    if n < 2:
        return mean, math.inf
    return mean, math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1) / n)


def surely_more(gain: float, error: float, of: int = 1) -> bool:
    """Whether a gain exceeds its noise: the lower end of its 95 % interval is above 0. `of`: the gain is the largest of
    so many, of which the largest is often large by chance."""
    return gain > margin(error, of)


def margin(error: float, of: int = 1) -> float:
    """Half the width of the 95 % interval around a mean with this standard error; of the largest of so many means, the
    width that covers all of them (Bonferroni)."""
    return (Z if of <= 1 else NormalDist().inv_cdf(1 - 0.025 / of)) * error
