"""The table of metrics, in the order of exports: fields of a StepRecord, and what follows from its requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np

from core.metrics.metric import Metric, Outcome, Reduction
from core.metrics.record import StepRecord

KINDS: Mapping[str, type] = {"int": int, "float": float, "bool": bool}


def _requests(name: str, help: str, *outcomes: Outcome, **more: Any) -> Metric:
    return Metric(name, "requests", int, help, outcomes=outcomes, **more)


COUNTED: tuple[Metric, ...] = tuple(
    replace(each.metadata["metric"], name=each.name, kind=KINDS[str(each.type)])
    for each in fields(StepRecord)
    if "metric" in each.metadata
)
"""The metrics that are fields of a StepRecord and columns of the database."""
REQUESTS: tuple[Metric, ...] = (
    _requests("requests", "Distinct experts asked for in a layer, summed over forward passes.", *Outcome, frame=True),
    _requests(
        "hits",
        "Requests whose expert was resident and ready when routing was known, prefetch hits included.",
        Outcome.HIT,
        Outcome.PREFETCH_HIT,
        frame=True,
    ),
    _requests(
        "prefetch_hits",
        "Hits on experts that a prefetch brought and that had not been used since.",
        Outcome.PREFETCH_HIT,
    ),
    _requests(
        "late",
        "Requests whose expert was still being copied: compute waited for the rest of the copy.",
        Outcome.PARTIAL_HIT,
    ),
    _requests(
        "misses",
        "Requests whose expert was neither resident nor on its way: fetched on demand from host memory, or computed "
        "there.",
        Outcome.MISS,
    ),
    _requests(
        "disk_misses",
        "The same, but host memory did not have it either: read from disk.",
        Outcome.MISS_DISK,
        reduce="sum",
    ),
    _requests(
        "substituted",
        "Requests whose expert was missing and for which nothing was fetched: others took its place.",
        Outcome.SUBSTITUTED,
    ),
    _requests("dropped", "The same, and nothing took its place.", Outcome.DROPPED),
    _requests(
        "predicted",
        "Requests for which nothing was fetched because a predicted routing was computed without them.",
        Outcome.PREDICTED,
    ),
)
HIT_RATE = Metric(
    "hit_rate", "share", float, "hits / requests; empty when there was no request.", reduce=("hits", "requests")
)
ROUTED: tuple[Metric, ...] = (
    Metric(
        "assignments",
        "assignments",
        int,
        "Experts that the router gave to the tokens of the pass, over all layers.",
        reduce="sum",
    ),
    Metric("changed", "assignments", int, "Of those, how many another expert or nothing took the place of.", "sum"),
)
_first = [one for one in COUNTED if one.unit in ("tokens", "s", "ms")]
METRICS: tuple[Metric, ...] = (*_first, *REQUESTS, HIT_RATE, *(one for one in COUNTED if one not in _first), *ROUTED)
"""Every metric, in the order of the exports: sizes and times, requests, everything else that is counted, routing."""
BY_NAME: Mapping[str, Metric] = {one.name: one for one in METRICS}


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
