"""Slots, store and link without bytes, on a clock that only moves when it is advanced.

They replace the real ones of `core.memory`, so that the engine's own cache runs over them."""

from collections.abc import Callable, Iterable
from typing import Any

from core.memory.slot import Slot
from core.memory.ticket import CANCELLED, QUEUED, STARTED, Queue, Ticket
from core.types import Origin

NOTHING: Any = None


class VirtualSlots:
    """An unlimited number of slots without memory."""

    def __init__(self) -> None:
        self._next = self._count = 0

    def allocate(self, layer: int = -1) -> Slot:
        """A new slot."""
        self._next, self._count = self._next + 1, self._count + 1
        return Slot(self._next - 1, NOTHING)

    def free(self, slot: Slot) -> None:
        """Gives a slot back."""
        self._count -= 1

    def expect(self, count: int, by_layer: bool = False) -> bool:
        """Slots have no memory, and so are alike."""
        return False

    def fits(self, slot: Slot, layer: int) -> bool:
        """Slots are alike."""
        return True

    def fit(self, slot: Slot, layer: int) -> None:
        """Does nothing."""

    def pack(self, settle: Callable[[], None]) -> None:
        """Does nothing: slots have no memory that others could use."""

    def __len__(self) -> int:
        return self._count


class VirtualExperts:
    """Experts of one size, all in host memory."""

    def __init__(self, blob_bytes: int) -> None:
        self.blob_bytes = blob_bytes

    def bytes_of(self, eid: int) -> int:
        """Bytes copied to fetch an expert."""
        return self.blob_bytes

    def use_policy(self, make_policy: Any, usual: Any) -> None:
        """Does nothing: no expert ever leaves host memory."""

    def begin_pass(self, now: int) -> None:
        """Does nothing: no expert ever leaves host memory."""

    def origin(self, eid: int) -> Origin:
        """Where a fetch would find the expert."""
        return "host"

    def host_resident(self) -> None:
        """All of them."""


class VirtualLink:
    """One copy at a time, each `load_s` long: demand copies first, then prefetches by priority, as on an emulated link.

    A copy starts when it is submitted or when the link becomes free, whichever is later. `fetch(ticket)` is called at
    each start; with it the link carries real bytes in virtual time."""

    lanes = 1

    def __init__(self, load_s: float, fetch: Callable[[Ticket], None] | None = None) -> None:
        self.load_s = load_s
        self._clock_s = self._free_s = 0.0
        self._fetch = fetch
        self._queue = Queue()
        self._finished: list[Ticket] = []

    def now_s(self) -> float:
        """Virtual seconds since the start."""
        return self._clock_s

    def advance(self, seconds: float) -> None:
        """Moves the clock forward and starts the copies that are due."""
        self._clock_s += seconds
        self._work()

    def submit(self, ticket: Ticket) -> Ticket:
        """Queues a copy; it starts at once when the link is idle."""
        ticket.submitted_s = self._clock_s
        self._queue.push(ticket)
        self._work()
        return ticket

    def promote(self, ticket: Ticket) -> bool:
        """Turns a queued prefetch into a demand copy. False when it is no longer queued."""
        if ticket.state != QUEUED or ticket.demand:
            return False
        ticket.submitted_s = self._clock_s
        self._queue.promote(ticket)
        return True

    def cancel(self, ticket: Ticket) -> bool:
        """Removes a copy from the queue; False when it has started."""
        if ticket.state == QUEUED:
            self._queue.remove(ticket)
            ticket.state = CANCELLED
        return bool(ticket.state == CANCELLED)

    def rank(self, priorities: Iterable[tuple[Ticket, float]]) -> None:
        """Sets new priorities of the queued prefetches."""
        self._queue.rank(priorities)

    def landed(self, ticket: Ticket) -> bool:
        """Whether the copy has finished."""
        return bool(ticket.state == STARTED and ticket.landed_s <= self._clock_s)

    def wait(self, ticket: Ticket) -> float:
        """Advances the clock until the copy has finished; returns the seconds. One that is still queued starts next."""
        if ticket.state == QUEUED:
            self._queue.remove(ticket)
            self._start(ticket)
        waited_s = max(0.0, ticket.landed_s - self._clock_s)
        self.advance(waited_s)
        return waited_s

    def settle(self, ticket: Ticket) -> None:
        """Does nothing: copies on this link follow one another, so the slot may be reused at once."""

    def wake(self) -> None:
        """Does nothing: a copy starts when the link is free, whoever waits for it."""

    def forget(self) -> None:
        """Forgets the finished copies."""
        self._finished.clear()

    def restart(self) -> None:
        """Resets the clock to zero and the link to idle."""
        self._clock_s = self._free_s = 0.0
        self.forget()

    def copy_s(self, size_bytes: int) -> float:
        """Seconds that one copy takes."""
        return self.load_s

    def backlog_s(self) -> float:
        """Seconds until the copy in flight and the queued demand copies are done."""
        return max(0.0, self._free_s - self._clock_s) + len(self._queue.demand) * self.load_s

    def take_finished(self) -> list[Ticket]:
        """Copies that have started, each returned once."""
        taken, self._finished = self._finished, []
        return taken

    def _work(self) -> None:
        while self._free_s <= self._clock_s and len(self._queue):
            self._start(self._queue.pop())

    def _start(self, ticket: Ticket) -> None:
        ticket.state = STARTED
        ticket.started_s = max(self._free_s, ticket.submitted_s)
        ticket.landed_s = self._free_s = ticket.started_s + self.load_s
        if self._fetch is not None:
            self._fetch(ticket)
        ticket.done.set()
        self._finished.append(ticket)
