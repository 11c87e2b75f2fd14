"""What all forward passes since the start came to, for programs that watch the server."""

import threading
from collections import Counter
from typing import Any

import numpy as np

from app.services.progress import Answer
from core.metrics import METRICS, Outcome, StepRecord

PLAIN = [one for one in METRICS if not one.outcomes and not isinstance(one.reduce, tuple)]  # counted by themselves


class Totals:
    """Sums and last values of the metrics that core.metrics lists, by phase. Any thread may call any method."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: Counter[tuple[str, str]] = Counter()
        self._passes: Counter[str] = Counter()
        self._answers: Counter[str] = Counter()
        self._last: dict[str, float] = {}
        self._outcomes: dict[str, Any] = {}  # phase -> requests by outcome [len(Outcome)]

    def add(self, step: StepRecord) -> None:
        """Count a forward pass."""
        with self._lock:
            self._passes[step.phase] += 1
            outcomes = np.bincount(step.outcome, minlength=len(Outcome))
            self._outcomes[step.phase] = self._outcomes.get(step.phase, 0) + outcomes
            for one in PLAIN:
                if one.level:
                    self._last[one.name] = float(getattr(step, one.name))
                else:
                    self._sums[one.name, step.phase] += getattr(step, one.name)

    def ended(self, answer: Answer) -> None:
        """Count an answer that was begun and has ended."""
        reason = "error" if answer.error else answer.stats.reason if answer.stats is not None else "cancelled"
        with self._lock:
            self._answers[reason] += 1

    @property
    def sums(self) -> dict[tuple[str, str], float]:
        """(metric, phase) -> its sum over the passes: for a yes or no, the number of passes with a yes."""
        with self._lock:
            counted = {
                (one.name, phase): int(count[list(one.outcomes)].sum())
                for one in METRICS
                for phase, count in self._outcomes.items()
                if one.outcomes
            }
            return {**self._sums, **counted}

    @property
    def last(self) -> dict[str, float]:
        """Metric -> its value in the last pass, of those whose sum says nothing."""
        with self._lock:
            return dict(self._last)

    @property
    def passes(self) -> dict[str, int]:
        """Phase -> forward passes."""
        with self._lock:
            return dict(self._passes)

    @property
    def ended_answers(self) -> int:
        """Answers that have ended."""
        with self._lock:
            return self._answers.total()

    @property
    def answers(self) -> dict[str, int]:
        """Why it ended -> answers."""
        with self._lock:
            return dict(self._answers)
