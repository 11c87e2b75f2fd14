"""Copy tickets, the copy queue, and the interface of a link."""

import threading
from bisect import insort
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from core.memory.slot import Slot
from core.types import Segment

QUEUED, STARTED, LANDED, CANCELLED = range(4)


class Ticket:
    """One copy, of a segment into its slots: queued -> started -> landed, or queued -> cancelled. Times are seconds on
    its link's clock; `landed_s` may lie in the future while an emulated link delays the copy."""

    __slots__ = (
        "begin",
        "behind",
        "bytes",
        "demand",
        "disk_bytes",
        "displaced",
        "done",
        "error",
        "event",
        "for_draft",
        "landed_s",
        "number",
        "phase",
        "priority",
        "score",
        "segment",
        "slots",
        "started_s",
        "state",
        "submitted_s",
        "waited",
    )

    def __init__(self, segment: Segment, slots: Sequence[Slot], size: int, demand: bool, phase: str) -> None:
        """`slots`: one per block of `segment`, which has `size` bytes."""
        self.segment, self.slots, self.bytes, self.demand, self.phase = segment, slots, size, demand, phase
        self.disk_bytes = 0  # bytes read from disk for it, known when it is done
        self.state = QUEUED
        self.done = threading.Event()  # CPU: bytes are complete; CUDA: the copy is issued and `event` is recorded
        self.begin: Any = None  # CUDA events around the copy
        self.event: Any = None
        self.error: BaseException | None = None  # why the copy failed
        self.submitted_s = self.started_s = self.landed_s = 0.0
        self.score = self.priority = 0.0  # of a prefetch: predicted probability of use, and queue priority
        self.waited = False  # the thread that submits this copy out of host memory waits for it next
        self.behind = False  # neither demand nor prefetch: the host has computed the expert, which is cached for later
        self.for_draft = False  # a prefetch for guessed tokens
        self.displaced = -1  # eid evicted for this prefetch; -1 = none
        self.number = 0  # submission order

    @property
    def eid(self) -> int:
        """The expert of the segment."""
        return self.segment.eid

    def fail(self, error: BaseException) -> None:
        """It will never be made, unless it is done."""
        if not self.done.is_set():
            self.error, self.state = error, LANDED
            self.done.set()


class Queue:
    """Copies that have not started: demands first, in FIFO order; then prefetches by descending priority, ties in
    submission order. Not thread-safe: the owner must lock it."""

    def __init__(self) -> None:
        self.demand: deque[Ticket] = deque()
        self.prefetch: list[Ticket] = []  # the next one is last
        self._count = 0

    def push(self, ticket: Ticket) -> None:
        """Queue a copy by its kind and priority."""
        self._count += 1
        ticket.number = self._count
        if ticket.demand:
            self.demand.append(ticket)
        else:
            insort(self.prefetch, ticket, key=_order)

    def pop(self) -> Ticket:
        """Remove and return the next copy. Raises IndexError when the queue is empty."""
        return self.demand.popleft() if self.demand else self.prefetch.pop()

    def remove(self, ticket: Ticket) -> None:
        """Remove a copy. Raises ValueError when it is not queued."""
        (self.demand if ticket.demand else self.prefetch).remove(ticket)

    def promote(self, ticket: Ticket) -> None:
        """Turn a queued prefetch into a demand, behind the demands already queued."""
        self.prefetch.remove(ticket)
        ticket.demand = True
        self.demand.append(ticket)

    def rank(self, priorities: Iterable[tuple[Ticket, float]]) -> None:
        """Set new priorities of queued prefetches; tickets that are no longer queued keep theirs."""
        for ticket, priority in priorities:
            if ticket.state == QUEUED and not ticket.demand:
                ticket.priority = priority
        self.prefetch.sort(key=_order)

    def __len__(self) -> int:
        return len(self.demand) + len(self.prefetch)


def _order(ticket: Ticket) -> tuple[float, int]:
    return ticket.priority, -ticket.number


class Link(Protocol):
    """What the cache requires of a link: `core.memory.transfer.TransferEngine`, or a simulated link."""

    def submit(self, ticket: Ticket) -> Ticket: ...
    def promote(self, ticket: Ticket) -> bool: ...
    def cancel(self, ticket: Ticket) -> bool: ...
    def rank(self, priorities: Iterable[tuple[Ticket, float]]) -> None: ...
    def landed(self, ticket: Ticket) -> bool: ...
    def wait(self, ticket: Ticket) -> float: ...
    def settle(self, ticket: Ticket) -> None: ...
    def forget(self) -> None: ...

    def wake(self) -> None:
        """Copies that are left to who waits for them are made by others."""

    def now_s(self) -> float:
        """Current time on the link's clock, seconds."""

    def copy_s(self, size_bytes: int) -> float:
        """Seconds that a copy of `size_bytes` takes, measured or emulated; 0 = not known yet."""

    def backlog_s(self) -> float:
        """Seconds until the copies in flight and the queued demands are done."""

    @property
    def lanes(self) -> int:
        """Number of copies that run in parallel."""
