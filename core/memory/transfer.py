"""Copies into device slots: demand before prefetch, queued prefetches cancellable.

A ticket is queued -> started -> landed, or queued -> cancelled. One worker thread serves the queue where experts come
from host memory, two where they are read from disk. On a CPU the thread that waits for a queued copy makes it itself
rather than sit idle; on CUDA the workers issue copies on a stream of their own and computation waits for their events,
not for the host.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from core.errors import MoestroError
from core.memory.arena import Slot
from core.memory.link import Pace, sleep_until

QUEUED, STARTED, LANDED, CANCELLED = range(4)


class Ticket:
    """One copy. `landed_s` may lie in the future while an emulated link holds it back."""

    __slots__ = ("begin", "bytes", "demand", "disk_bytes", "done", "eid", "error", "event", "landed_s", "phase", "slot",
                 "started_s", "state", "submitted_s")

    def __init__(self, eid: int, slot: Slot, size: int, demand: bool, phase: str) -> None:
        self.eid, self.slot, self.bytes, self.demand, self.phase = eid, slot, size, demand, phase
        self.disk_bytes = 0             # read from disk for it, known when it is over
        self.state = QUEUED
        self.done = threading.Event()   # CPU: bytes are there; CUDA: the copy is issued and `event` is recorded
        self.begin: Any = None          # CUDA events around the copy
        self.event: Any = None
        self.error: BaseException | None = None   # why the bytes are not there although the copy is over
        self.submitted_s = time.perf_counter()
        self.started_s = self.landed_s = 0.0


class TransferEngine:
    """Owns the link. `fetch(eid, slot.raw)` writes an expert into a slot and tells what it read from disk for it."""

    def __init__(self, device: torch.device, fetch: Callable[[int, torch.Tensor], int], workers: int = 1) -> None:
        self._fetch, self._cuda = fetch, device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self._cuda else None
        self.pace = Pace(0.0, 0.0)
        self._demand: deque[Ticket] = deque()
        self._prefetch: deque[Ticket] = deque()
        self._lock = threading.Condition()
        self._closing = False
        self._finished: deque[Ticket] = deque(maxlen=65536)
        self._stalls: list[tuple[Any, Any]] = []
        self._threads = [threading.Thread(target=self._serve, name=f"moestro-link-{i}", daemon=True)
                         for i in range(workers)]
        for thread in self._threads:
            thread.start()

    def submit(self, ticket: Ticket) -> Ticket:
        """Queue a copy; demands go before every queued prefetch."""
        with self._lock:
            (self._demand if ticket.demand else self._prefetch).append(ticket)
            self._lock.notify()
        return ticket

    def promote(self, ticket: Ticket) -> bool:
        """A prefetch is now demanded: it goes before all others. False when it is no longer queued."""
        with self._lock:
            if ticket.state != QUEUED or ticket.demand:
                return False
            self._prefetch.remove(ticket)
            ticket.demand, ticket.submitted_s = True, time.perf_counter()
            self._demand.append(ticket)
            return True

    def cancel(self, ticket: Ticket) -> bool:
        """Take a copy out of the queue; False when it has started. Cancelling twice is the same as once."""
        with self._lock:
            if ticket.state != QUEUED:
                return ticket.state == CANCELLED
            (self._demand if ticket.demand else self._prefetch).remove(ticket)
            ticket.state = CANCELLED
            return True

    def landed(self, ticket: Ticket) -> bool:
        """Whether the bytes can be computed from without waiting."""
        if not ticket.done.is_set() or ticket.error is not None:
            return False
        if self._cuda and not ticket.event.query():
            return False
        return ticket.landed_s <= time.perf_counter()

    def wait(self, ticket: Ticket) -> float:
        """Return when the slot may be computed from; the seconds that this thread stood still.

        On CUDA the compute stream is made to wait instead, and `device_stall_s` tells for how long. Raises what the
        store raised when the copy failed.
        """
        begin = time.perf_counter()
        if self._steal(ticket):
            self._copy(ticket)
        ticket.done.wait()
        if isinstance(ticket.error, MoestroError):
            raise ticket.error
        if ticket.error is not None:
            raise RuntimeError("A copy of expert weights failed.") from ticket.error
        if self._cuda:
            before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            before.record()
            torch.cuda.current_stream().wait_event(ticket.event)
            after.record()
            self._stalls.append((before, after))
        if self.pace or ticket.landed_s > begin:
            sleep_until(ticket.landed_s)
        return time.perf_counter() - begin

    def settle(self, ticket: Ticket) -> None:
        """Return when the copy no longer writes; its slot may then be given to another expert."""
        ticket.done.wait()
        if ticket.error is None:
            ticket.slot.fence = ticket.event  # None on a CPU; on CUDA the next copy and `Arena.free` wait for it

    def take_finished(self) -> list[Ticket]:
        """Copies that are complete, each handed out once; on CUDA their length is what the device's events say."""
        taken: list[Ticket] = []
        while self._finished:
            ticket = self._finished[0]
            if self._cuda and ticket.error is None:
                if not ticket.event.query():
                    break
                seconds = ticket.begin.elapsed_time(ticket.event) / 1e3
                ticket.landed_s = max(ticket.landed_s, ticket.started_s + seconds)
            taken.append(self._finished.popleft())
        return taken

    def forget(self) -> None:
        """Drop what was noted of copies and of waiting for them so far."""
        self._finished.clear()
        self._stalls.clear()

    def device_stall_s(self) -> float:
        """Seconds that the compute stream has waited for copies since the last call; call it when that is idle."""
        stalls, self._stalls = self._stalls, []
        return sum(float(before.elapsed_time(after)) for before, after in stalls) / 1e3

    def fence(self) -> Any:
        """A mark in the compute stream: slots released at it may be overwritten after it. None on a CPU."""
        if not self._cuda:
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    def close(self) -> None:
        """Stop the workers; queued copies are dropped, started ones are finished."""
        with self._lock:
            self._closing = True
            self._lock.notify_all()
        for thread in self._threads:
            thread.join()

    def _steal(self, ticket: Ticket) -> bool:
        if self._cuda:
            return False
        with self._lock:
            if ticket.state != QUEUED:
                return False
            (self._demand if ticket.demand else self._prefetch).remove(ticket)
            self._start(ticket)
            return True

    def _start(self, ticket: Ticket) -> None:
        """Under the lock: the copy now occupies the link."""
        ticket.state = STARTED
        ticket.started_s = time.perf_counter()
        if self.pace:
            ticket.started_s, ticket.landed_s = self.pace.book(ticket.submitted_s, ticket.bytes)

    def _copy(self, ticket: Ticket) -> None:
        try:
            if self._stream is None:
                ticket.disk_bytes = self._fetch(ticket.eid, ticket.slot.raw)
            else:
                with torch.cuda.stream(self._stream):
                    if ticket.slot.fence is not None:
                        self._stream.wait_event(ticket.slot.fence)
                    ticket.begin = torch.cuda.Event(enable_timing=True)
                    ticket.event = torch.cuda.Event(enable_timing=True)
                    ticket.begin.record(self._stream)
                    ticket.disk_bytes = self._fetch(ticket.eid, ticket.slot.raw)
                    ticket.event.record(self._stream)
        except BaseException as error:
            ticket.error = error
        ticket.landed_s = max(ticket.landed_s, time.perf_counter())
        ticket.state = LANDED
        ticket.done.set()
        self._finished.append(ticket)

    def _next(self) -> Ticket | None:
        """Block for the next copy to make; None when closing. While the link is busy, queues stay cancellable."""
        with self._lock:
            while not self._closing:
                busy = self.pace.free_s - time.perf_counter() if self.pace else 0.0
                if busy > 0:
                    self._lock.wait(busy)
                elif self._demand or self._prefetch:
                    ticket = (self._demand or self._prefetch).popleft()
                    self._start(ticket)
                    return ticket
                else:
                    self._lock.wait()
            return None

    def _serve(self) -> None:
        previous: Ticket | None = None
        while (ticket := self._next()) is not None:
            self._copy(ticket)
            if self._cuda:  # two copies in flight keep the link busy and the rest of the queue cancellable
                if previous is not None and previous.event is not None:
                    previous.event.synchronize()
                previous = ticket
