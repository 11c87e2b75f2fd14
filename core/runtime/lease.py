"""The words of the cache: what a layer holds while it computes, and what was counted on the way."""

from __future__ import annotations

from dataclasses import dataclass

from core.memory.arena import Slot
from core.memory.transfer import Ticket
from core.types import Outcome


@dataclass(slots=True)
class Held:
    """One leased expert: where it is, and the copy to wait for (None = ready)."""

    expert: int
    eid: int
    slot: Slot
    outcome: Outcome
    ticket: Ticket | None


@dataclass(slots=True)
class Lease:
    """The experts a layer is computing with; none can be evicted until `release`."""

    layer: int
    held: list[Held]


@dataclass(slots=True)
class Counts:
    """What prefetching and copying did since the last `take`."""

    issued: int = 0
    used: int = 0
    late: int = 0
    wasted: int = 0
    demand_bytes: int = 0
    prefetch_bytes: int = 0
    wasted_bytes: int = 0

    def arrived(self, size: int, *, late: bool) -> None:
        """A prefetched expert was asked for, and was there or on its way."""
        self.prefetch_bytes += size
        self.used += not late
        self.late += late

    def waste(self, size: int) -> None:
        """A prefetched expert leaves, or its layer is over, without its having been used."""
        self.wasted += 1
        self.wasted_bytes += size
        self.prefetch_bytes += size
