"""Metrics over the passes of an answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from core.metrics.record import Metric, Outcome, Reduction, StepRecord
from core.metrics.table import BY_NAME, METRICS

REDUCTIONS: Mapping[Reduction, Callable[[list[Any]], Any]] = {
    "sum": sum,
    "mean": lambda values: sum(values) / len(values) if values else 0.0,
    "max": lambda values: max(values, default=0),
    "last": lambda values: values[-1] if values else 0,
    "all": all,
    "any": any,
}


def reduced(steps: Sequence[StepRecord]) -> dict[str, Any]:
    """Each metric that has a `reduce`, over the passes of an answer: the mean, and the share of two sums, over the
    decoded tokens, everything else over all passes."""
    decode = [step for step in steps if step.phase == "decode"]
    found: dict[str, Any] = {}
    for one in METRICS:
        if isinstance(one.reduce, tuple):
            found[one.name] = share(decode, *one.reduce)
        elif one.reduce is not None:
            found[one.name] = REDUCTIONS[one.reduce](values(decode if one.reduce == "mean" else steps, one))
    return found


def share(steps: Sequence[StepRecord], part: str, whole: str) -> float | None:
    """The sum of one metric over that of another; None where that is 0."""
    of = sum(values(steps, BY_NAME[whole]))
    return sum(values(steps, BY_NAME[part])) / of if of else None


def values(steps: Sequence[StepRecord], one: Metric) -> list[Any]:
    """A metric of each pass."""
    if not one.outcomes:
        return [getattr(step, one.name) for step in steps]
    wanted = np.isin(np.arange(len(Outcome)), one.outcomes)
    return [int(wanted[step.outcome].sum()) for step in steps]
