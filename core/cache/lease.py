"""Leases of a layer's experts: what they hold, and how a layer that needs more experts than there are slots takes them.

Used by the engine and the simulator.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from core.cache.core import CacheCore
from core.memory.slot import Slot
from core.memory.ticket import Ticket
from core.policy.allocation.slots import waves
from core.types import Outcome, Segment

L = TypeVar("L")  # a lease, of any cache


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
    of them to land, or the whole expert. `hosted`: those of `requests` without segments, as the host computes the
    experts where they lie."""

    layer: int
    eids: Sequence[int]
    segments: list[LeasedSegment]
    requests: list[LeasedSegment]
    hosted: Sequence[LeasedSegment] = ()


def in_waves(
    core: CacheCore[Any],
    layer: int,
    wanted: Sequence[int],
    acquire: Callable[[Sequence[int]], L],
    release: Callable[[L], None],
    look_ahead: Callable[[], None] = lambda: None,
) -> Iterator[L]:
    """Lease all of `wanted`, distinct experts of `layer`, in waves when they do not fit: while one wave is computed,
    the experts of later ones are copied. `acquire` leases those of one wave.

    Each lease is released when the next one is taken. `look_ahead` is called once the last one is acquired.
    """
    if not wanted:
        look_ahead()
        return
    base, table, blocks, capacity = layer * core.experts, core.table, core.blocks, core.capacity_for(layer)
    groups = waves(wanted, capacity, lambda expert: blocks - len(table[base + expert]))
    yield from leases(groups, capacity, acquire, release, look_ahead)


def leases(
    groups: Sequence[Sequence[int]],
    capacity: int,
    acquire: Callable[[Sequence[int]], L],
    release: Callable[[L], None],
    look_ahead: Callable[[], None] = lambda: None,
) -> Iterator[L]:
    """Lease one group after the other, and with it as many of the following ones as fit into `capacity` experts: their
    missing experts are copied while it is computed, and their residents stay."""
    ahead: deque[L] = deque()
    acquired = held = 0  # groups so far, and experts that are leased
    for i, group in enumerate(groups):
        while acquired < len(groups) and (acquired == i or held + len(groups[acquired]) <= capacity):
            ahead.append(acquire(groups[acquired]))
            held += len(groups[acquired])
            acquired += 1
            if acquired == len(groups):
                look_ahead()
        lease = ahead.popleft()
        yield lease
        release(lease)
        held -= len(group)
