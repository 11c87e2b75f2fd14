"""Summarises for the deck what lossy options did over some forward passes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from core.choices import TAE_BINS, Action, LossyLook
from core.types import StepRecord


def look(
    window: Sequence[StepRecord],
    tail: Sequence[StepRecord],
    layers: int,
    threshold: Sequence[float],
    buddies: npt.NDArray[np.float32] | None,
) -> LossyLook:
    """`window` = the passes of the current figures, `tail` = those of the timelines; other arguments as in
    LossyLook."""
    did = [step for step in window if step.lossy is not None]
    assignments = sum(step.assignments for step in did)
    per_layer = np.zeros((layers, 3), np.float32)
    for at, action in enumerate((Action.SUBSTITUTE, Action.DROP, Action.PREDICTED)):
        for step in did:
            assert step.lossy is not None
            rows = step.lossy.choices
            per_layer[:, at] += np.bincount(rows["layer"][rows["action"] == action], minlength=layers)
    return LossyLook(
        sum(step.changed for step in did) / max(1, assignments),
        per_layer / max(1.0, assignments / layers),
        _entropies(did, layers),
        np.array(threshold, np.float32),
        _mean("delta", tail),
        _mean("beta", tail),
        buddies,
    )


def _entropies(steps: Sequence[StepRecord], layers: int) -> npt.NDArray[np.uint32]:
    counts = np.zeros((layers, TAE_BINS), np.int64)
    for step in steps:
        assert step.lossy is not None
        tae = step.lossy.tae.astype(np.float32)
        cells = np.minimum(np.nan_to_num(tae) * TAE_BINS, TAE_BINS - 1).astype(np.int64)
        cells += np.arange(layers)[:, None] * TAE_BINS
        counts += np.bincount(cells[~np.isnan(tae)], minlength=counts.size).reshape(counts.shape)
    return counts.astype(np.uint32)


def _mean(name: str, steps: Sequence[StepRecord]) -> npt.NDArray[np.float32]:
    """[N] mean over the layers that have a value; NaN for a step without any."""
    found = np.full(len(steps), np.nan, np.float32)
    for at, step in enumerate(steps):
        values: npt.NDArray[Any] | None = getattr(step.lossy, name, None)
        if values is not None and not np.isnan(values).all():
            found[at] = np.nanmean(values)
    return found
