"""Medians over rounds, and what pairs of the same round say: a slow hour of the machine affects both sides of a
pair."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import comb
from statistics import median
from typing import Any

CONFIDENCE = 0.95


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


def spread(values: Sequence[float]) -> dict[str, Any]:
    """The median, the least and most, and the interval that holds the true median with a confidence of CONFIDENCE,
    whatever the distribution; None where there are too few values for one."""
    return {"median": median(values), "least": min(values), "most": max(values), "interval": interval(values)}


def interval(values: Sequence[float]) -> list[float] | None:
    """Of the median, by order statistics: the number of values below it is binomial."""
    count, ordered, below = len(values), sorted(values), 0.0
    for at in range(count // 2 + 1):  # how many values may be cut off at each end
        if below + comb(count, at) / 2**count > (1 - CONFIDENCE) / 2:
            return [ordered[at - 1], ordered[count - at]] if at else None
        below += comb(count, at) / 2**count
    return None
