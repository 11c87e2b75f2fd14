"""Pauses prefetching while it costs more than it saves, and tries it again after a while."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from core.settings.prefetch import PrefetchSettings
from core.types import StepRecord

WINDOW = 32  # decoded tokens per judgement
REST = 128  # tokens of the first pause; doubles after each failed trial
LONGEST = 4096  # longest pause
MARGIN = 0.02  # share of token time that the loss must exceed before prefetching is paused


class PrefetchThrottle:
    """Judges by the net milliseconds of decoded tokens (core.cache.counts). The first WINDOW of them, after a
    start or a pause, only warm up predictors that learn.

    It pauses when their mean over a window is below -MARGIN of the mean token time, and continues after a trial only
    when the mean is not below 0: values near 0 neither pause nor resume it. `say(text)` is called for both. Where it
    may not pause, it says once what prefetching costs.
    """

    def __init__(self) -> None:
        self.say: Callable[[str], None] = lambda text: None
        self.enabled = False
        self.paused = False
        self.restart()

    def configure(self, old: PrefetchSettings | None, new: PrefetchSettings) -> None:
        """Judge, or do not."""
        self.enabled = new.auto

    def restart(self) -> None:
        """Discard all measurements because what is prefetched, or how, has changed. Ends a pause."""
        self._net_ms: deque[float] = deque(maxlen=WINDOW)  # of the last tokens
        self._total_ms: deque[float] = deque(maxlen=WINDOW)
        self._warming, self._left, self._rest, self._trial = WINDOW, 0, REST, False
        self.paused = self._told = False

    def note(self, step: StepRecord) -> None:
        """Take a pass into account; only decoded tokens count."""
        if step.phase != "decode" or (self._told and not self.enabled):
            return
        if self.paused:
            self._left -= 1
            if self._left <= 0:
                self._try_again()
        elif self._warming:
            self._warming -= 1
        else:
            self._net_ms.append(step.net_ms)
            self._total_ms.append(step.total_ms)
            if len(self._net_ms) == WINDOW:
                self._judge()

    def _judge(self) -> None:
        net_ms, total_ms = sum(self._net_ms) / WINDOW, sum(self._total_ms) / WINDOW
        if net_ms < (0.0 if self._trial else -MARGIN * total_ms):
            if not self.enabled:
                self._told = True
                self.say(
                    f"prefetching costs {-net_ms:.2f} ms a token more than it saves; with prefetch_auto it would pause"
                )
                return
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
        self._net_ms.clear()
        self._total_ms.clear()
        self.say("prefetching is tried again")
