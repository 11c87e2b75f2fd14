"""Data types of the cache: leases of a layer that is computed, and the counts of copies and prefetches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import NamedTuple

from core.memory.slot import Slot
from core.memory.ticket import Ticket
from core.types import Outcome, Segment


@dataclass(slots=True)
class LeasedSegment:
    """Consecutive blocks of a leased expert: the slots that hold them, and the copy to wait for (None = ready). Never
    changed: all hits of an expert are leased as one object."""

    expert: int
    segment: Segment
    slots: Sequence[Slot]  # one per block
    outcome: Outcome
    ticket: Ticket | None

    @property
    def slot(self) -> Slot:
        """The slot of a segment of one block. Raises ValueError when it has several."""
        (slot,) = self.slots
        return slot


class SkippedRequest(NamedTuple):
    """An expert that the router chose but that is not fetched."""

    expert: int
    outcome: Outcome


@dataclass(slots=True)
class Lease:
    """The experts a layer is computed with, `eids`, as segments that together are all blocks of each; none can be
    evicted until `release`. `requests`: of the segments, one for each expert, with the outcome of its request: the last
    of them to come, or the whole of it."""

    layer: int
    eids: Sequence[int]
    segments: list[LeasedSegment]
    requests: list[LeasedSegment]


@dataclass(slots=True)
class Counts:
    """Counts of prefetches, copies and bypasses since the last `take_counts`, under their names in core.metrics."""

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
    top_hits: int = 0
    spared: list[Ticket] = field(default_factory=list)  # prefetches that were requested, in time or late
    lost: list[Ticket] = field(default_factory=list)  # demand copies of experts evicted for a wasted prefetch

    def arrived(self, ticket: Ticket, *, late: bool) -> None:
        """A prefetched expert was requested and was resident, or still being copied (`late`)."""
        self.prefetch_bytes += ticket.bytes
        self.prefetch_used += not late
        self.prefetch_late += late
        self.late_bytes += ticket.bytes * late
        self.spared.append(ticket)

    def waste(self, size: int, *, evicted: bool) -> None:
        """A prefetched expert was evicted, or its layer was computed, without its being used."""
        self.prefetch_wasted += 1
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


FIGURES = tuple(one.name for one in fields(Counts) if one.type == "int")
_values = attrgetter(*FIGURES)
