"""What lossy options did in the last passes, for the deck."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from core.metrics.lossy_events import TAE_BINS, Action, LossyLook
from core.types import StepRecord


def look(
    window: Sequence[StepRecord],
    delta: npt.NDArray[np.float32],
    beta: npt.NDArray[np.float32],
    layers: int,
    threshold: Sequence[float],
    buddies: npt.NDArray[np.float32] | None,
) -> LossyLook:
    """`window` = the passes of the current figures; `delta` and `beta`: [N] of the passes of the timelines; other
    arguments as in LossyLook."""
    lossy = [step.lossy for step in window if step.lossy is not None]
    assignments = sum(step.assignments for step in window if step.lossy is not None)
    changed, tae = np.zeros((layers, 3), np.int64), np.zeros((layers, TAE_BINS), np.uint32)
    if lossy:
        rows = np.concatenate([one.choices for one in lossy])
        for at, action in enumerate((Action.SUBSTITUTE, Action.DROP, Action.PREDICTED)):
            changed[:, at] = np.bincount(rows["layer"][rows["action"] == action], minlength=layers)
        tae = _entropies(np.concatenate([one.tae for one in lossy], axis=1))
    return LossyLook(
        float(changed.sum()) / max(1, assignments),
        (changed / max(1.0, assignments / layers)).astype(np.float32),
        tae,
        np.array(threshold, np.float32),
        delta,
        beta,
        buddies,
        assignments,
    )


def _entropies(tae: npt.NDArray[np.float16]) -> npt.NDArray[np.uint32]:
    """[L, TAE_BINS] tokens by the entropy [L, T] of their gate weights; without those that have none (NaN)."""
    layers = len(tae)
    cells = np.minimum(np.nan_to_num(tae.astype(np.float32)) * TAE_BINS, TAE_BINS - 1).astype(np.int64)
    cells += np.arange(layers)[:, None] * TAE_BINS
    return np.bincount(cells[~np.isnan(tae)], minlength=layers * TAE_BINS).reshape(layers, -1).astype(np.uint32)
