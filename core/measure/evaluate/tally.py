"""Costs of decoding under one configuration: sums over forward passes, and means per token."""

from __future__ import annotations

import math
from collections import Counter
from statistics import stdev

from core.metrics.lossy_events import Action
from core.types import StepRecord

RUN, FEWEST = 8, 5  # decode passes that are one draw of the time, and draws that an error needs
SUMMED = (
    *("total_ms", "compute_ms", "stall_ms", "idle_ms", "copy_ms", "requests", "hits", "assignments", "changed"),
    *("demand_bytes", "prefetch_bytes"),
)
LOSSY = {"substituted": Action.SUBSTITUTE, "dropped": Action.DROP, "predicted": Action.PREDICTED}  # parts of "changed"


class ModeTotals:
    """Call with every forward pass; only decode passes count. Figures: SUMMED, LOSSY, "link_bytes" (demand copies and
    prefetches); times in ms."""

    def __init__(self) -> None:
        self.tokens, self.emulated = 0, False
        self._sums, self._passes_ms = Counter[str](), list[float]()

    def __call__(self, step: StepRecord) -> None:
        if step.phase != "decode":
            return
        self.tokens += step.tokens
        self.emulated |= step.emulated
        self._passes_ms.append(step.total_ms)
        self._sums.update({name: getattr(step, name) for name in SUMMED})
        self._sums["link_bytes"] += step.demand_bytes + step.prefetch_bytes
        if step.lossy is not None:
            self._sums.update({name: step.lossy.count(action) for name, action in LOSSY.items()})

    @property
    def total_ms_se(self) -> float | None:
        """The standard error of the mean time per pass, from runs of RUN passes, as neighbours are alike; None with
        fewer than FEWEST such runs."""
        runs = [sum(self._passes_ms[at : at + RUN]) for at in range(0, len(self._passes_ms) - RUN + 1, RUN)]
        return stdev(runs) / math.sqrt(len(runs)) / RUN if len(runs) >= FEWEST else None

    def total(self, name: str) -> float:
        """A sum over all passes."""
        return self._sums[name]

    def mean(self, name: str) -> float | None:
        """A sum per decoded token; None when none was decoded."""
        return self._sums[name] / self.tokens if self.tokens else None

    def rate(self, name: str, of: str) -> float | None:
        """One sum as a share of another; None when that is 0."""
        return self._sums[name] / whole if (whole := self._sums[of]) else None
