"""The figures of the last forward passes as columns, so that a frame of the live deck is made of slices."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from core.metrics import COUNTED, REQUESTS, ROUTED, Outcome, StepRecord
from core.runtime.lossy_summary import mean

RING = 512  # forward passes kept
KEPT = (*COUNTED, *ROUTED)
COUNTS = tuple(one for one in REQUESTS if one.frame)
ROWS = {
    name: row
    for row, name in enumerate(
        ("index", *(one.name for one in KEPT), *(one.name for one in COUNTS), "decode", "delta", "beta")
    )
}
_values = attrgetter("index", *(one.name for one in KEPT))


class Timelines:
    """The last RING passes. What was written is never written again, so a view stays valid while passes are added."""

    def __init__(self, layers: int) -> None:
        self._layers = layers
        self._end = 0
        self._columns = np.empty((len(ROWS), 2 * RING))
        self._outcomes = np.empty((2 * RING, layers, len(Outcome)), np.int16)

    def extend(self, steps: Sequence[StepRecord]) -> None:
        """Append up to RING passes."""
        if self._end + len(steps) > 2 * RING:
            columns, outcomes = self.view()
            self._columns, self._outcomes = np.empty_like(self._columns), np.empty_like(self._outcomes)
            self._columns[:, :RING], self._outcomes[:RING], self._end = columns, outcomes, RING
        at = slice(self._end, self._end + len(steps))
        columns = self._columns[:, at]
        columns[: 1 + len(KEPT)] = np.array([_values(step) for step in steps]).T
        columns[ROWS["decode"]] = [step.phase == "decode" for step in steps]
        for name in ("delta", "beta"):
            columns[ROWS[name]] = [np.nan if step.lossy is None else mean(getattr(step.lossy, name)) for step in steps]
        self._outcomes[at], by_pass = _outcomes(steps, self._layers)
        for one in COUNTS:
            columns[ROWS[one.name]] = by_pass[:, one.outcomes].sum(1)
        self._end = at.stop

    def view(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int16]]:
        """The columns [ROWS, N] of the last N passes, oldest first, and their requests by layer and outcome
        [N, L, Outcome]."""
        kept = slice(max(0, self._end - RING), self._end)
        return self._columns[:, kept], self._outcomes[kept]


def _outcomes(steps: Sequence[StepRecord], layers: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Requests [len(steps), layers, Outcome], and over all layers [len(steps), Outcome]."""
    kinds, passes = len(Outcome), len(steps)
    outcome = np.concatenate([step.outcome for step in steps])
    of = np.repeat(np.arange(passes), [step.outcome.size for step in steps])
    cell = (of * layers + np.concatenate([step.layer for step in steps])) * kinds + outcome
    return (
        np.bincount(cell, minlength=passes * layers * kinds).reshape(passes, layers, kinds),
        np.bincount(of * kinds + outcome, minlength=passes * kinds).reshape(passes, kinds),
    )
