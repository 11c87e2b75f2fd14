"""Paired differences of one run with their intervals: the one way in which results are compared.

Two subjects of a run are compared block by block. A block is what a run repeats nearly independently: a round, an
answer, a question, a stretch of decoded tokens; neighbouring tokens are alike, so a token alone is no block. The
interval is the delete-one-block jackknife's with Student's t (Efron and Tibshirani 1993, chapter 11; for a mean over
stretches these are batch means, Law and Kelton chapter 9). A figure that is a mean over blocks is given by its blocks,
any other one by its pseudo-values, so that an interval always follows from one list of numbers a subject."""

import math
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean, stdev
from typing import NamedTuple, TypeVar

CONFIDENCE = 0.95  # of all differences that one answer rests on together (Bonferroni)
FEWEST = 3  # blocks below which there is no interval
STRETCH = 16  # decoded tokens of a block

B = TypeVar("B")


class Difference(NamedTuple):
    """What one subject has more than another: the mean over blocks, and half of its interval."""

    mean: float
    half: float
    blocks: int

    @property
    def low(self) -> float:
        return self.mean - self.half

    @property
    def high(self) -> float:
        return self.mean + self.half


def difference(some: Sequence[float], others: Sequence[float] | float, comparisons: int = 1) -> Difference | None:
    """The difference of two subjects, or of one and a number, with an interval that holds for all of `comparisons`
    together with CONFIDENCE. None where blocks are not the same number, or fewer than FEWEST."""
    than = [others] * len(some) if isinstance(others, (int, float)) else others
    if len(some) != len(than) or len(some) < FEWEST:
        return None
    pairs = [a - b for a, b in zip(some, than, strict=True)]
    error = stdev(pairs) / math.sqrt(len(pairs))
    return Difference(fmean(pairs), student(len(pairs) - 1, 1 - (1 - CONFIDENCE) / comparisons) * error, len(pairs))


class Ratio(NamedTuple):
    """How many times as much one subject has as another: the geometric mean over blocks, and its interval, None where
    there are too few."""

    ratio: float
    low: float | None
    high: float | None


def times(some: Sequence[float], others: Sequence[float]) -> Ratio:
    """The ratio of two subjects' figures above 0, from the same blocks, as the difference of their logarithms."""
    logs = [math.log(a / b) for a, b in zip(some, others, strict=True)]
    between = difference(logs, 0.0)
    low, high = (math.exp(between.low), math.exp(between.high)) if between is not None else (None, None)
    return Ratio(math.exp(fmean(logs)), low, high)


def pseudo_values(blocks: Sequence[B], statistic: Callable[[Sequence[B]], float]) -> list[float]:
    """The jackknife's pseudo-values of a statistic of blocks; their mean is the statistic, less most of its bias."""
    n, whole = len(blocks), statistic(blocks)
    return [n * whole - (n - 1) * statistic([*blocks[:at], *blocks[at + 1 :]]) for at in range(n)] if n > 1 else []


def ratios(parts: Iterable[float], wholes: Iterable[float]) -> list[float]:
    """Pseudo-values of a sum over another, such as hits over requests, of each block (part, whole)."""
    return pseudo_values(
        list(zip(parts, wholes, strict=True)),
        lambda rows: sum(part for part, _ in rows) / (sum(whole for _, whole in rows) or 1.0),
    )


def stretches(values: Sequence[float]) -> list[float]:
    """The means of consecutive stretches of tokens."""
    return [fmean(values[at : at + STRETCH]) for at in _starts(values)]


def token_ratios(parts: Sequence[float], wholes: Sequence[float]) -> list[float]:
    """The same of stretches of tokens, each of which has a part and a whole."""
    return ratios(*([sum(one[at : at + STRETCH]) for at in _starts(one)] for one in (parts, wholes)))


def _starts(values: Sequence[float]) -> range:
    """Where stretches begin; the last few tokens, which fill none, are left out."""
    return range(0, len(values) - STRETCH + 1, STRETCH)


def student(freedom: int, share: float) -> float:
    """The value within which Student's t with so many degrees of freedom stays, on both sides, with a probability of
    `share`: by bisection of its distribution (Abramowitz and Stegun 26.7.3 and 26.7.4)."""

    def within(angle: float) -> float:
        cosine, sine = math.cos(angle), math.sin(angle)
        if freedom == 1:
            return 2 * angle / math.pi
        term = total = 1.0 if freedom % 2 == 0 else cosine
        for at in range(1 if freedom % 2 == 0 else 2, freedom - 2, 2):
            term *= at / (at + 1) * cosine * cosine
            total += term
        return sine * total if freedom % 2 == 0 else 2 / math.pi * (angle + sine * total)

    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if within(middle) < share else (low, middle)
    return math.sqrt(freedom) * math.tan(low)
