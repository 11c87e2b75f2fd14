"""How much waiting was saved by not fetching what was missing: an estimate, and marked as one wherever it is shown.

saved a decoded token = spared / tokens x wait, over the decoded tokens of an answer.
  spared = distinct (layer, expert) requests of a token that were missing and for which nothing was fetched.
  wait   = what a request for something missing has cost in this session: the time that computing stood still, over the
           last decoded tokens that had to wait, divided by the requests they waited for. What of a copy is hidden
           behind computing is thereby left out. Before anything was waited for: how long the link takes for a copy.
It says nothing of what the prompt saved, of the copies that are spared later because other experts stay, and of the
time that choosing a substitute takes, which is part of the token's own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from core.types import Outcome, StepRecord

WINDOW = 256   # decoded tokens that waited for something


class Waits:
    """`copy_ms()` = what the link takes for one expert, by all that is known."""

    def __init__(self, copy_ms: Callable[[], float]) -> None:
        self._copy_ms = copy_ms
        self._last: deque[tuple[float, int]] = deque(maxlen=WINDOW)   # (stall ms, requests waited for)

    def note(self, steps: Sequence[StepRecord]) -> None:
        """More forward passes of the session, of any answer."""
        for step in steps:
            waited = int(((step.outcome >= Outcome.LATE) & (step.outcome <= Outcome.MISS_DISK)).sum())
            if step.phase == "decode" and waited:
                self._last.append((step.stall_ms, waited))

    def wait_ms(self) -> float:
        """What one miss costs here."""
        requests = sum(n for _, n in self._last)
        return sum(ms for ms, _ in self._last) / requests if requests else self._copy_ms()

    def saved_ms(self, steps: Sequence[StepRecord]) -> float | None:
        """Of one answer, a decoded token; None when none was decoded or nothing was recorded."""
        decode = [step for step in steps if step.phase == "decode" and step.requests]
        if not decode:
            return None
        return sum(spared(step) for step in decode) / len(decode) * self.wait_ms()


def spared(step: StepRecord) -> int:
    """Requests of a pass that were missing and for which nothing was fetched."""
    return int((step.outcome >= Outcome.SUBSTITUTED).sum())
