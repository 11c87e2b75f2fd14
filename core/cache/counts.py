"""What the cache counts, and what prefetching saved and cost by it.

The net time in milliseconds that prefetching saved in one forward pass is computed from the copies that were made:

saved = over the prefetched experts that were requested, in time or late: the time of their copies; less the time that
        the compute thread waited for the late ones.
cost  = the predictor's own time on the compute thread (predicting, ranking predictions, queueing copies)
      + delay of demands: over the prefetches in flight when a demand was submitted, from the first such demand until
        that copy ended, since the link makes one copy after the other; and over demanded experts that had been evicted
        for wasted prefetches, the time of their copies. Together at most the time that the compute thread waited for
        demands: what was hidden behind computing cost nothing.
net   = saved - cost. It is an upper bound on the gain: without prefetching, part of a saved copy might have been hidden
        behind the computation of resident experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

from core.memory.ticket import Ticket


class Counts:
    """Counts of prefetches, copies and bypasses since the last `take_counts`, under their names in core.metrics; and
    the copies that `PrefetchCost` judges by."""

    prefetch_issued: int = 0
    prefetch_used: int = 0
    prefetch_late: int = 0
    prefetch_wasted: int = 0
    prefetch_evicted: int = 0  # of the wasted: evicted before their layer was reached
    demand_bytes: int = 0
    prefetch_bytes: int = 0
    late_bytes: int = 0
    wasted_bytes: int = 0
    evicted_bytes: int = 0
    bypassed: int = 0
    host_computed: int = 0
    host_admitted: int = 0
    admitted_bytes: int = 0
    top_hits: int = 0
    draft_prefetch_issued: int = 0
    draft_prefetch_hits: int = 0
    draft_prefetch_wasted: int = 0

    def __init__(self) -> None:
        self.spared: list[Ticket] = []  # prefetches that were requested, in time or late
        self.lost: list[Ticket] = []  # demand copies of experts evicted for a wasted prefetch

    def issued(self, ticket: Ticket, change: int = 1) -> None:
        """A prefetch was begun; -1: it is none after all."""
        self.prefetch_issued += change
        self.draft_prefetch_issued += change * ticket.for_draft

    def arrived(self, ticket: Ticket, *, late: bool) -> None:
        """A prefetched expert was requested and was resident, or still being copied (`late`)."""
        self.prefetch_bytes += ticket.bytes
        self.prefetch_used += not late
        self.prefetch_late += late
        self.draft_prefetch_hits += ticket.for_draft
        self.late_bytes += ticket.bytes * late
        self.spared.append(ticket)

    def waste(self, ticket: Ticket, *, evicted: bool) -> None:
        """A prefetched expert was evicted, or its layer was computed, without its being used."""
        size = ticket.bytes
        self.prefetch_wasted += 1
        self.draft_prefetch_wasted += ticket.for_draft
        self.wasted_bytes += size
        self.prefetch_evicted += evicted
        self.evicted_bytes += size * evicted
        self.prefetch_bytes += size

    def figures(self) -> dict[str, int]:
        """The counts by name."""
        return dict(zip(FIGURES, self.values(), strict=True))

    def forget_tickets(self) -> None:
        """Keep only what is counted, and no copy alive."""
        self.spared.clear()
        self.lost.clear()

    def values(self) -> tuple[int, ...]:
        """The counts in the order of FIGURES."""
        found: tuple[int, ...] = _values(self)
        return found

    def add(self, other: Counts) -> None:
        """Add the counts of another pass; not its tickets."""
        for name in FIGURES:
            setattr(self, name, getattr(self, name) + getattr(other, name))


FIGURES = tuple(Counts.__annotations__)
_values = attrgetter(*FIGURES)


class PrefetchCost:
    """Judges one pass after the other. Copies of a prefetch may end in an earlier or later pass than the one using
    them."""

    def __init__(self) -> None:
        self._in_flight: list[tuple[float, float]] = []  # (start, end) of prefetches that had not landed a pass ago
        self.predict_s = 0.0  # of this pass, on the compute thread
        self.spared_s = 0.0  # copies of its experts that had been prefetched, in time or late
        self.late_s = 0.0  # waits for late prefetches in this pass
        self.caused_s = 0.0  # these, and the delay of demands

    def begin(self) -> None:
        """Start a pass."""
        self.predict_s = self.late_s = self.spared_s = self.caused_s = 0.0

    def net_ms(self, counts: Counts, finished: Sequence[Ticket], late_s: float, stall_s: float) -> float:
        """The net time of the pass that ends now. `finished` = copies completed since the last pass; `stall_s` = all
        waits for copies, `late_s` = those for late prefetches."""
        copies = [(t.started_s, t.landed_s) for t in finished if not (t.demand or t.behind)]
        if not (copies or counts.spared or counts.lost or self._in_flight or self.predict_s):
            return 0.0
        self.spared_s = _length_s(counts.spared)
        saved_s = self.spared_s - late_s
        spans = sorted({*copies, *self._in_flight})
        demands = sorted(t.submitted_s for t in finished if t.demand)
        held_up_s = min(blocked_s(spans, demands) + _length_s(counts.lost), max(0.0, stall_s - late_s))
        self.caused_s = late_s + held_up_s
        latest = max((t.landed_s for t in finished), default=0.0)
        self._in_flight = [span for span in spans if span[1] >= latest]
        return (saved_s - self.predict_s - held_up_s) * 1e3


def blocked_s(prefetches: Sequence[tuple[float, float]], demands: Sequence[float]) -> float:
    """Seconds by which prefetches (start, end) delayed demands submitted while they ran; both sorted by time."""
    held_s, at = 0.0, 0
    for start, end in prefetches:
        while at < len(demands) and demands[at] < start:
            at += 1
        if at < len(demands) and demands[at] < end:
            held_s += end - demands[at]
    return held_s


def _length_s(copies: Sequence[Ticket]) -> float:
    return sum(t.landed_s - t.started_s for t in copies if t.error is None)
