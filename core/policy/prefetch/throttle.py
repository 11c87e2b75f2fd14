"""Pauses prefetching while it costs more than it saves, and tries it again after a while."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from core.types import StepRecord

WINDOW = 32  # decoded tokens that a judgement rests on
REST = 128  # tokens of the first pause; each one that follows a failed trial is twice as long ...
LONGEST = 4096  # ... up to this
MARGIN = 0.02  # of a token's time: what the loss must exceed before prefetching is paused


class PrefetchThrottle:
    """Judges by the net milliseconds of decoded tokens (core.cache.prefetch_cost). The first WINDOW of them,
    after a start or a pause, only warm up what learns.

    It pauses when their mean over a window is below -MARGIN of the mean token time, and goes on from a trial only when
    it is not below 0: what is near 0 neither stops it nor brings it back. `say(text)` is told of either.
    """

    def __init__(self) -> None:
        self.say: Callable[[str], None] = lambda text: None
        self.enabled = False
        self.paused = False
        self.restart()

    def restart(self) -> None:
        """Forget what was measured: something else is prefetched, or otherwise. A pause is over."""
        self._window: deque[tuple[float, float]] = deque(maxlen=WINDOW)  # (net, total) ms of the last tokens
        self._warming, self._left, self._rest, self._trial = WINDOW, 0, REST, False
        self.paused = False

    def note(self, step: StepRecord) -> None:
        """Another pass is over; only decoded tokens count."""
        if not self.enabled or step.phase != "decode":
            return
        if self.paused:
            self._left -= 1
            if self._left <= 0:
                self._try_again()
        elif self._warming:
            self._warming -= 1
        else:
            self._window.append((step.net_ms, step.total_ms))
            if len(self._window) == WINDOW:
                self._judge()

    def _judge(self) -> None:
        net_ms, total_ms = (sum(column) / WINDOW for column in zip(*self._window, strict=True))
        if net_ms < (0.0 if self._trial else -MARGIN * total_ms):
            self.paused, self._left = True, self._rest
            self.say(
                f"prefetching paused: it cost {-net_ms:.2f} ms a token more than it saved; next try in "
                f"{self._rest} tokens"
            )
            self._rest = min(LONGEST, 2 * self._rest)
        elif self._trial:
            self._trial, self._rest = False, REST

    def _try_again(self) -> None:
        self.paused, self._trial, self._warming = False, True, WINDOW
        self._window.clear()
        self.say("prefetching is tried again")
