"""One copy, what carries copies, and the order in which they are carried."""

from __future__ import annotations

import threading
from bisect import insort
from collections import deque
from collections.abc import Iterable
from typing import Any, Protocol

from core.memory.slot import Slot

QUEUED, STARTED, LANDED, CANCELLED = range(4)


class Ticket:
    """One copy: queued -> started -> landed, or queued -> cancelled. Times are seconds on its link's clock, and
    `landed_s` may lie in the future while an emulated link holds the copy back."""

    __slots__ = (
        "begin",
        "bytes",
        "demand",
        "disk_bytes",
        "displaced",
        "done",
        "eid",
        "error",
        "event",
        "landed_s",
        "number",
        "phase",
        "priority",
        "score",
        "slot",
        "started_s",
        "state",
        "submitted_s",
    )

    def __init__(self, eid: int, slot: Slot, size: int, demand: bool, phase: str) -> None:
        self.eid, self.slot, self.bytes, self.demand, self.phase = eid, slot, size, demand, phase
        self.disk_bytes = 0  # read from disk for it, known when it is over
        self.state = QUEUED
        self.done = threading.Event()  # CPU: bytes are there; CUDA: the copy is issued and `event` is recorded
        self.begin: Any = None  # CUDA events around the copy
        self.event: Any = None
        self.error: BaseException | None = None  # why the bytes are not there although the copy is over
        self.submitted_s = self.started_s = self.landed_s = 0.0
        self.score = self.priority = 0.0  # of a prefetch: how likely it is used, and its place in the queue
        self.displaced = -1  # eid that left its slot for a prefetch; -1 = nobody did
        self.number = 0  # in the order of submission


class Queue:
    """Copies that have not started. Demands first, in order; then prefetches, the highest priority first and among
    equals the one submitted first. Not locked: whoever owns it does that."""

    def __init__(self) -> None:
        self.demand: deque[Ticket] = deque()
        self.prefetch: list[Ticket] = []  # the next one last
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
        """The next one; it is queued no more. Raises IndexError when there is none."""
        return self.demand.popleft() if self.demand else self.prefetch.pop()

    def remove(self, ticket: Ticket) -> None:
        """Take one out. Raises ValueError when it is not queued."""
        (self.demand if ticket.demand else self.prefetch).remove(ticket)

    def promote(self, ticket: Ticket) -> None:
        """A prefetch is demanded now: it goes behind the demands before it."""
        self.prefetch.remove(ticket)
        ticket.demand = True
        self.demand.append(ticket)

    def rank(self, priorities: Iterable[tuple[Ticket, float]]) -> None:
        """Give queued prefetches new priorities; what is not queued any more keeps its own."""
        for ticket, priority in priorities:
            if ticket.state == QUEUED and not ticket.demand:
                ticket.priority = priority
        self.prefetch.sort(key=_order)

    def __len__(self) -> int:
        return len(self.demand) + len(self.prefetch)


def _order(ticket: Ticket) -> tuple[float, int]:
    return ticket.priority, -ticket.number


class Link(Protocol):
    """What the cache asks of whatever carries copies: `core.memory.transfer.TransferEngine`, or a simulated link."""

    def submit(self, ticket: Ticket) -> Ticket: ...
    def promote(self, ticket: Ticket) -> bool: ...
    def cancel(self, ticket: Ticket) -> bool: ...
    def rank(self, priorities: Iterable[tuple[Ticket, float]]) -> None: ...
    def landed(self, ticket: Ticket) -> bool: ...
    def wait(self, ticket: Ticket) -> float: ...
    def settle(self, ticket: Ticket) -> None: ...
    def forget(self) -> None: ...

    def now_s(self) -> float:
        """Its clock."""

    def copy_s(self, size_bytes: int) -> float:
        """Seconds that a copy takes, measured or emulated; 0 = not known yet."""

    def backlog_s(self, size_bytes: int) -> float:
        """Seconds until the link is done with what is under way and with the demands that wait, of that size each."""

    @property
    def lanes(self) -> int:
        """Copies that it carries side by side."""
