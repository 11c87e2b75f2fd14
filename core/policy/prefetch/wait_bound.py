"""Decides how long a pass may wait for its prediction before it begins: at most as long as that saves.

Source: ExpertFlow section 3.1.1, where the routing paths are known before the computation begins; how long that may
take is left open there."""

from __future__ import annotations

from collections import deque
from statistics import fmean, median

WINDOW = 33  # passes remembered; odd, so that the median is one of them


class WaitBound:
    """For one predictor; prompts and single tokens apart. Times in seconds.

    saves = mean stall of passes whose prediction came after they had begun, less that of passes which it preceded.
            While no pass of the first kind is known, the second kind's stall plus the copies that their prefetches
            spared stand for it; while none of the second kind is known, 0 does.
    left  = what the search is expected to take (median a token, times tokens), less the time since it was asked for.

    A pass waits only if left <= saves, and then for at most `saves`, whatever becomes of the search."""

    def __init__(self) -> None:
        self._searches: dict[bool, deque[float]] = {}  # a prompt? -> seconds a token
        self.restart()

    def restart(self) -> None:
        """Forget the stalls: they were those of other settings."""
        self._stalls: dict[tuple[bool, bool], deque[tuple[float, float]]] = {}  # (a prompt?, in time?) -> stall, spared

    def searched(self, tokens: int, took_s: float) -> None:
        """A search for so many tokens took so long, or at least so long if it has not ended."""
        self._searches.setdefault(tokens > 1, deque(maxlen=WINDOW)).append(took_s / max(1, tokens))

    def passed(self, tokens: int, stall_s: float, spared_s: float, *, in_time: bool) -> None:
        """A pass ended. `spared_s`: duration of the copies that its prefetches spared it; `in_time`: its prediction was
        there when it began."""
        self._stalls.setdefault((tokens > 1, in_time), deque(maxlen=WINDOW)).append((stall_s, spared_s))

    def saves_s(self, tokens: int) -> float:
        """The stall that a pass is spared when its prediction is there as it begins; 0 while nothing is known."""
        before, after = (self._stalls.get((tokens > 1, in_time), ()) for in_time in (True, False))
        had_s = fmean(stall for stall, _ in before) if before else 0.0
        if after:
            return max(0.0, fmean(stall for stall, _ in after) - had_s)
        return fmean(spared for _, spared in before) if before else 0.0

    def limit_s(self, tokens: int, since_s: float) -> float:
        """How long a pass may wait now, `since_s` after its search was asked for; 0 = it does not wait."""
        searches = self._searches.get(tokens > 1)
        if not searches:
            return 0.0
        saves_s = self.saves_s(tokens)
        return saves_s if median(searches) * tokens - since_s <= saves_s else 0.0
