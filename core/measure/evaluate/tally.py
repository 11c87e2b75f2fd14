"""Costs of decoding under one configuration: sums over forward passes, and means per token."""

import math
from dataclasses import dataclass

from core.metrics.lossy_events import Action
from core.types import StepRecord

RUN, FEWEST = 8, 5  # decode passes that are one draw of the time, and draws that an error needs


@dataclass(slots=True)
class ModeTotals:
    """Call with every forward pass; only decode passes count. Times in ms."""

    tokens: int = 0
    total_ms: float = 0.0
    compute_ms: float = 0.0
    stall_ms: float = 0.0
    idle_ms: float = 0.0
    copy_ms: float = 0.0
    link_bytes: int = 0  # demand copies and prefetches
    prefetch_bytes: int = 0
    requests: int = 0
    hits: int = 0
    assignments: int = 0  # (token, layer, expert) assignments of the routers
    changed: int = 0  # ... of them changed: the sum of
    substituted: int = 0
    dropped: int = 0
    predicted: int = 0
    emulated: bool = False
    _run_ms: float = 0.0  # of the passes since the last whole run of RUN
    _run_passes: int = 0
    _runs: int = 0
    _run_sum: float = 0.0  # of whole runs' times
    _run_squares: float = 0.0

    def __call__(self, step: StepRecord) -> None:
        if step.phase != "decode":
            return
        self.tokens += step.tokens
        self._note(step.total_ms)
        for name in (
            "total_ms",
            "compute_ms",
            "stall_ms",
            "idle_ms",
            "copy_ms",
            "requests",
            "hits",
            "assignments",
            "changed",
            "prefetch_bytes",
        ):
            setattr(self, name, getattr(self, name) + getattr(step, name))
        self.link_bytes += step.demand_bytes + step.prefetch_bytes
        self.emulated |= step.emulated
        if step.lossy is not None:
            self.substituted += step.lossy.count(Action.SUBSTITUTE)
            self.dropped += step.lossy.count(Action.DROP)
            self.predicted += step.lossy.count(Action.PREDICTED)

    def _note(self, total_ms: float) -> None:
        self._run_ms, self._run_passes = self._run_ms + total_ms, self._run_passes + 1
        if self._run_passes == RUN:
            self._runs, self._run_sum = self._runs + 1, self._run_sum + self._run_ms
            self._run_squares += self._run_ms**2
            self._run_ms, self._run_passes = 0.0, 0

    @property
    def total_ms_se(self) -> float | None:
        """The standard error of the mean time per pass, from runs of RUN passes, as neighbours are alike; None with
        fewer than FEWEST such runs."""
        if self._runs < FEWEST:
            return None
        spread = max(0.0, self._run_squares - self._run_sum**2 / self._runs) / (self._runs - 1)
        return math.sqrt(spread / self._runs) / RUN

    def mean(self, name: str) -> float | None:
        """A sum per decoded token; None when none was decoded."""
        return float(getattr(self, name)) / self.tokens if self.tokens else None

    def rate(self, name: str, of: str) -> float | None:
        """One sum as a share of another; None when that is 0."""
        whole = getattr(self, of)
        return getattr(self, name) / whole if whole else None
