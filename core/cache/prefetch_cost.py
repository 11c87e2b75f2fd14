"""What prefetching saved and what it cost in one forward pass, from the copies that were made: net milliseconds.

saved = over the prefetched experts that were asked for, in time or late: how long their copies took; less the time that
        computing waited for the late ones.
cost  = the predictor's own time on the computing thread (asking it, ranking its guesses, queueing copies)
      + held up: over the prefetches under way when a demand was submitted, from the first such demand until that copy
        ended, since the link makes one copy after the other; and over demanded experts that had left their slots for
        prefetches which came to nothing, how long their copies took. Together at most the time that computing waited
        for demands: what was hidden behind computing cost nothing.
net   = saved - cost. It is what prefetching won at most: without it, part of a spared copy might have been hidden
        behind the computing of experts that were there.
"""

from __future__ import annotations

from collections.abc import Sequence

from core.cache.lease import Counts
from core.memory.ticket import Ticket


class PrefetchCost:
    """One pass after the other. Copies of a prefetch may end passes before its computing is over, or after."""

    def __init__(self) -> None:
        self._under_way: list[tuple[float, float]] = []  # (start, end) of prefetches that had not landed a pass ago
        self.predict_s = 0.0  # of this pass, on the computing thread ...
        self.late_s = 0.0  # ... and waited for late prefetches

    def begin(self) -> None:
        """A pass begins."""
        self.predict_s = self.late_s = 0.0

    def net_ms(self, counts: Counts, finished: Sequence[Ticket], late_s: float, stall_s: float) -> float:
        """Of the pass that ends now. `finished` = copies complete since the last pass; `stall_s` = all waits for
        copies, `late_s` = those for late prefetches."""
        copies = [(t.started_s, t.landed_s) for t in finished if not t.demand]
        if not (copies or counts.spared or counts.lost or self._under_way or self.predict_s):
            return 0.0
        saved_s = _length_s(counts.spared) - late_s
        spans = sorted({*copies, *self._under_way})
        demands = sorted(t.submitted_s for t in finished if t.demand)
        held_up_s = min(blocked_s(spans, demands) + _length_s(counts.lost), max(0.0, stall_s - late_s))
        latest = max((t.landed_s for t in finished), default=0.0)
        self._under_way = [span for span in spans if span[1] >= latest]
        return (saved_s - self.predict_s - held_up_s) * 1e3


def blocked_s(prefetches: Sequence[tuple[float, float]], demands: Sequence[float]) -> float:
    """Seconds by which prefetches (start, end) held up demands that were submitted meanwhile; all sorted."""
    held_s, at = 0.0, 0
    for start, end in prefetches:
        while at < len(demands) and demands[at] < start:
            at += 1
        if at < len(demands) and demands[at] < end:
            held_s += end - demands[at]
    return held_s


def _length_s(copies: Sequence[Ticket]) -> float:
    return sum(t.landed_s - t.started_s for t in copies if t.error is None)
