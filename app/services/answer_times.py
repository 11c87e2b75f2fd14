"""Tracks the durations of recent answers and estimates the wait for a queued one."""

from __future__ import annotations

import math
import time
from collections import deque

from core.errors import BusyError

MOST_WAITING = 200  # queued answers, of the dashboard and the API together
REMEMBERED = 20  # ended answers that the expected wait is based on
UNKNOWN_S = 30  # when to retry while no answer has ended yet


class QueueFullError(BusyError):
    """The queue of answers is full. `retry_s`: seconds until a place is expected to be free."""

    def __init__(self, message: str, retry_s: int) -> None:
        super().__init__(message)
        self.retry_s = retry_s


class Turns:
    """Durations of answers from the start of writing to their end. Not thread-safe: guarded by the owner's lock."""

    def __init__(self) -> None:
        self._took_s: deque[float] = deque(maxlen=REMEMBERED)
        self._began_s: dict[int, float] = {}  # of the answers that are being written, oldest first

    def begin(self, key: int = 0) -> None:
        """Writing of the answer `key` starts."""
        self._began_s[key] = time.monotonic()

    def end(self, key: int = 0) -> None:
        """The answer has ended, in whatever state."""
        if (began_s := self._began_s.pop(key, None)) is not None:
            self._took_s.append(time.monotonic() - began_s)

    def require_place(self, waiting: int) -> None:
        """Raises QueueFullError, with the expected wait, when the queue is full."""
        if waiting < MOST_WAITING:
            return
        full = f"{waiting} answers are waiting already, and no more fit in the queue."
        if not self._took_s:
            raise QueueFullError(
                f"{full} How long they take is not known yet: none has finished so far. Ask again later.", UNKNOWN_S
            )
        mean_s = sum(self._took_s) / len(self._took_s)
        spent_s = time.monotonic() - min(self._began_s.values()) if self._began_s else 0.0
        left_s = max(0.0, mean_s - spent_s)
        raise QueueFullError(
            f"{full} Going by the last {len(self._took_s)} answers, a place is free in about {span(left_s)}, and its "
            f"answer begins about {span(mean_s * waiting)} after that. Ask again then.",
            max(1, math.ceil(left_s)),
        )


def span(seconds: float) -> str:
    """A waiting time as text."""
    whole = max(1, math.ceil(seconds))
    if whole < 120:
        return f"{whole} s"
    minutes = round(whole / 60)
    return f"{minutes} min" if minutes < 120 else f"{round(minutes / 60)} h"
