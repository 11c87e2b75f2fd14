"""Times a predictor's searches, and holds a pass for one that is worth it (core.policy.prefetch.wait_bound)."""

from __future__ import annotations

import time
from collections.abc import Callable

from core.policy.prefetch.wait_bound import WaitBound
from core.runtime.prediction.worker.memory import LOOK_S


def _pause() -> None:
    time.sleep(LOOK_S)


class AnswerWait:
    """For one predictor (core.policy.predict.base.AnswerWait), on the compute thread. `clock` in seconds; `pause` waits
    for a moment, in which an answer may come."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter, pause: Callable[[], None] = _pause) -> None:
        self._clock, self._pause = clock, pause
        self._asked: dict[int, tuple[float, int]] = {}  # search -> (when, tokens), until its answer
        self._running: tuple[int, bool] | None = None  # the pass: (tokens, its prediction was there before it)
        self.bound = WaitBound()

    def asked(self, number: int, tokens: int) -> None:
        """The search `number`, for so many tokens, was given to the worker."""
        self._asked[number] = self._clock(), tokens

    def answered(self, number: int) -> None:
        """Its answer is there."""
        if number in self._asked:
            asked_s, tokens = self._asked.pop(number)
            self.bound.searched(tokens, self._clock() - asked_s)

    def wait(self, number: int, tokens: int, there: Callable[[], bool]) -> None:
        """A pass over so many tokens begins: returns when the answer of search `number` is `there`, or when waiting
        longer would cost more than it saves. `there` takes answers and tells `answered` of them."""
        for old in [one for one in self._asked if one < number]:
            self.answered(old)  # unanswered all through its pass: it takes that long at least
        in_time = there()
        if not in_time and number in self._asked:
            now_s = self._clock()
            end_s = now_s + self.bound.limit_s(tokens, now_s - self._asked[number][0])
            while not in_time and self._clock() < end_s:
                self._pause()
                in_time = there()
        self._running = tokens, in_time

    def passed(self, stall_s: float, spared_s: float) -> None:
        """The pass ended; see WaitBound."""
        if self._running is not None:
            tokens, in_time = self._running
            self._running = None
            self.bound.passed(tokens, stall_s, spared_s, in_time=in_time)

    def restart(self) -> None:
        """Other settings act from now on."""
        self.bound.restart()
        self._running = None
