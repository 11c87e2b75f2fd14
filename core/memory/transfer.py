"""Copies into device slots: demands before prefetches, prefetches by priority, queued copies can be cancelled.

One worker thread serves the queue when experts come from host memory, two when they are read from disk. No prefetch
starts while a demand is queued or in flight. On a CPU, a thread that waits for a queued copy performs it itself instead
of blocking, and no worker is woken where that takes longer than the copy: what the host has computed is then copied by
the thread that submits it, unless the link is in use. On CUDA copies are issued on a separate
stream, and the compute stream (not the host) waits for their events: a demand for a row in pinned memory is issued by
the thread that requests it, which takes some microseconds and waits for no other thread; all else is issued by the
workers. A copy that fails raises in the thread that waits for it, and nowhere else; an error of the device ends the
workers, and every copy that is not done fails.
"""

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from core.errors import DeviceError, MoestroError
from core.memory.copy_records import CopyRecords
from core.memory.link import Pace, handover_s, sleep_until
from core.memory.ticket import CANCELLED, LANDED, QUEUED, STARTED, Queue, Ticket
from core.system.native import openmp

__all__ = ["CANCELLED", "LANDED", "QUEUED", "STARTED", "Ticket", "TransferEngine"]


class TransferEngine(CopyRecords):
    """Runs all copies over the link. `fetch(eid, raws, first)` writes blocks of an expert, from `first` on, into slots,
    and returns the bytes that it read from disk; on CUDA `is_pinned(eid)` says whether it only issues a copy."""

    def __init__(
        self,
        device: torch.device,
        fetch: Callable[[int, Sequence[torch.Tensor], int], int],
        workers: int = 1,
        is_pinned: Callable[[int], bool] = lambda eid: False,
    ) -> None:
        super().__init__(cuda=device.type == "cuda")
        self._fetch, self._is_pinned = fetch, is_pinned
        self._issuing = threading.Lock()  # of copies from pinned memory: events around one measure that copy alone
        self._stream = torch.cuda.Stream(device) if self._cuda else None
        self.pace = Pace(0.0, 0.0)
        self.hurried = False  # copies ignore the emulated pace, because they are not measured
        self._handover_s = 0.0 if self._cuda else handover_s()
        self._queue = Queue()
        self._flying: list[Ticket] = []  # started and not finished by this process
        self._lock = threading.Condition()
        self._closing = False
        self._lost: BaseException | None = None  # why the device can copy nothing more
        self._threads = [
            threading.Thread(target=self._serve, name=f"moestro-link-{i}", daemon=True) for i in range(workers)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, ticket: Ticket) -> Ticket:
        """Queue a copy; a demand precedes every queued prefetch. Where the device is lost, it has failed. One that is
        `waited` for is left to `wait` where waking a worker takes longer than the copy."""
        with self._lock:
            ticket.submitted_s = time.perf_counter()
            if self._lost is not None:
                ticket.fail(self._lost)
                return ticket
            self._queue.push(ticket)
            own = self._take_over(ticket)
            if not own and not (ticket.waited and self._is_quick(ticket)):
                self._lock.notify()
        if own:
            self._copy(ticket)
        return ticket

    def wake(self) -> None:
        """The workers make the copies that were left to `wait`."""
        with self._lock:
            self._lock.notify_all()

    def promote(self, ticket: Ticket) -> bool:
        """Turn a prefetch into a demand. Returns False when it is no longer queued."""
        with self._lock:
            if ticket.state != QUEUED or ticket.demand:
                return False
            ticket.submitted_s = time.perf_counter()
            self._queue.promote(ticket)
            if not (own := self._take_over(ticket)):
                self._lock.notify()
        if own:
            self._copy(ticket)
        return True

    def cancel(self, ticket: Ticket) -> bool:
        """Remove a copy from the queue; False when it has started. Cancelling twice has no further effect."""
        with self._lock:
            if ticket.state != QUEUED:
                return ticket.state == CANCELLED
            self._queue.remove(ticket)
            ticket.state = CANCELLED
            return True

    def rank(self, priorities: Iterable[tuple[Ticket, float]]) -> None:
        """Reprioritise the queued prefetches. A prefetch that has started is not affected."""
        with self._lock:
            self._queue.rank(priorities)

    @property
    def lanes(self) -> int:
        """Copies in parallel: one per worker; a paced link carries one at a time."""
        return 1 if self.pace else max(1, len(self._threads))

    def now_s(self) -> float:
        """Current time on the clock of tickets (perf_counter), seconds."""
        return time.perf_counter()

    def copy_s(self, size_bytes: int) -> float:
        """Seconds that a copy of `size_bytes` takes: the emulated time, else at the median pace of recent copies; 0
        before the first."""
        if self.pace:
            return self.pace.duration_s(size_bytes)
        return self._byte_s * size_bytes

    def backlog_s(self) -> float:
        """Seconds until copies in flight and queued demands are done, each as long as its bytes usually take. A copy in
        flight counts the rest of that; one that a GPU is still executing counts all of it."""
        byte_s, now_s = 0.0 if self.pace else self.copy_s(1), time.perf_counter()
        with self._lock:
            if self.pace:
                waiting = sum(self.pace.duration_s(t.bytes) for t in self._queue.demand)
                return max(0.0, self.pace.free_s - now_s) + waiting
            waiting = byte_s * sum(t.bytes for t in self._queue.demand)
            left = sum(max(0.0, t.started_s + byte_s * t.bytes - now_s) for t in self._flying)
            if self._cuda:
                executing = [t for t in list(self._finished)[-2:] if t.error is None and not t.event.query()]
                left += byte_s * sum(t.bytes for t in executing)
            return (left + waiting) / self.lanes

    def landed(self, ticket: Ticket) -> bool:
        """Whether the slot can be read without waiting."""
        if not ticket.done.is_set() or ticket.error is not None:
            return False
        if self._cuda and not ticket.event.query():
            return False
        return ticket.landed_s <= time.perf_counter()

    def wait(self, ticket: Ticket) -> float:
        """Return when computation may read the slot; returns the seconds that this thread was blocked.

        On CUDA the compute stream waits instead, and `device_stall_s` reports for how long. When the copy failed,
        raises the store's error, torch.OutOfMemoryError, or DeviceError.
        """
        begin = time.perf_counter()
        if self._steal(ticket):
            self._copy(ticket)
        ticket.done.wait()
        if isinstance(ticket.error, MoestroError | torch.OutOfMemoryError):
            raise ticket.error
        if ticket.error is not None:
            if self._cuda and isinstance(ticket.error, RuntimeError):
                raise DeviceError.of(ticket.error) from ticket.error
            raise RuntimeError("A copy of expert weights failed.") from ticket.error
        if self._cuda:
            before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            before.record()
            torch.cuda.current_stream().wait_event(ticket.event)
            after.record()
            self._stalls.append((before, after, ticket.demand))
        if self.pace or ticket.landed_s > begin:
            sleep_until(ticket.landed_s)
        return time.perf_counter() - begin

    def settle(self, ticket: Ticket) -> None:
        """Return when the copy no longer writes; its slot may then be reused for another expert."""
        ticket.done.wait()
        if ticket.error is None:
            for slot in ticket.slots:
                slot.fence = ticket.event  # None on a CPU; on CUDA the next copy and `Arena.free` wait for it

    def fence(self) -> Any:
        """An event in the compute stream: slots released with it may be overwritten after it. None on a CPU."""
        if not self._cuda:
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    def close(self) -> None:
        """Stop the workers; queued copies are dropped, started ones finish."""
        with self._lock:
            self._closing = True
            self._lock.notify_all()
        for thread in self._threads:
            thread.join()

    def _take_over(self, ticket: Ticket) -> bool:
        """Whether this thread makes, or on CUDA issues, a queued copy itself: it is then no longer queued. Requires the
        lock."""
        if self._cuda:
            own = ticket.demand and not self.pace and self._is_pinned(ticket.eid)
        else:
            own = ticket.behind and self._is_quick(ticket) and self._is_idle(ticket)
        if own:
            self._queue.remove(ticket)
            self._start(ticket)
        return own

    def _is_quick(self, ticket: Ticket) -> bool:
        """Whether waking a worker takes longer than the copy, on a CPU and out of host memory."""
        return 0 < self.placing_s(ticket.bytes) < self._handover_s

    def _is_idle(self, ticket: Ticket) -> bool:
        """Whether nothing but this copy is queued or in flight. Requires the lock."""
        return len(self._queue) == 1 and not self._flying and not (self.pace and self.pace.free_s > ticket.submitted_s)

    def _steal(self, ticket: Ticket) -> bool:
        with self._lock:
            own = not self._cuda and ticket.state == QUEUED
            if own:
                self._queue.remove(ticket)
                self._start(ticket)
            return own

    def _start(self, ticket: Ticket) -> None:
        """Mark a copy as occupying the link. Requires the lock."""
        ticket.state = STARTED
        self._flying.append(ticket)
        ticket.started_s = time.perf_counter()
        if self.pace and not self.hurried:
            ticket.started_s, ticket.landed_s = self.pace.book(ticket.submitted_s, ticket.bytes)

    def _copy(self, ticket: Ticket) -> None:
        try:
            eid, blocks = ticket.segment
            raws = [slot.raw for slot in ticket.slots]
            if self._stream is None:
                began_s = time.perf_counter()
                ticket.disk_bytes = self._fetch(eid, raws, blocks.start)
                if not ticket.disk_bytes:
                    self.placed(ticket.bytes, time.perf_counter() - began_s)
            else:
                with self._issuing if self._is_pinned(eid) else nullcontext(), torch.cuda.stream(self._stream):
                    for slot in ticket.slots:
                        if slot.fence is not None:
                            self._stream.wait_event(slot.fence)
                    ticket.begin = torch.cuda.Event(enable_timing=True)
                    ticket.event = torch.cuda.Event(enable_timing=True)
                    ticket.begin.record(self._stream)
                    ticket.disk_bytes = self._fetch(eid, raws, blocks.start)
                    ticket.event.record(self._stream)
        except BaseException as error:
            ticket.error = error
        ticket.landed_s = max(ticket.landed_s, time.perf_counter())
        ticket.state = LANDED
        self._finished.append(ticket)
        ticket.done.set()
        with self._lock:
            self._flying.remove(ticket)
            if self._queue.prefetch and ticket.demand:  # the prefetches waited for this demand
                self._lock.notify()

    def _next(self) -> Ticket | None:
        """Block until there is a copy to start; None when closing. While the link is busy, copies stay queued and so
        cancellable."""
        with self._lock:
            while not self._closing and self._lost is None:
                busy = self.pace.free_s - time.perf_counter() if self.pace and not self.hurried else 0.0
                if busy > 0:
                    self._lock.wait(busy)
                elif self._queue.demand or (self._queue.prefetch and not any(t.demand for t in self._flying)):
                    ticket = self._queue.pop()
                    self._start(ticket)
                    return ticket
                else:
                    self._lock.wait()
            return None

    def _serve(self) -> None:
        if not self._cuda:  # torch's threads compute the model at the same time
            openmp.single_thread()
        try:
            self._serve_all()
        except BaseException as error:  # of a CUDA call: no other thread sees it
            with self._lock:
                self._lost = self._lost or error
                left = [*self._queue.demand, *self._queue.prefetch, *self._flying]
                self._queue = Queue()
                for ticket in left:
                    ticket.fail(self._lost)
                self._lock.notify_all()

    def _serve_all(self) -> None:
        previous: Any = None  # the event of the copy before
        while (ticket := self._next()) is not None:
            self._copy(ticket)
            if self._cuda:  # two copies in flight keep the link busy and the rest of the queue cancellable ...
                waited = previous if ticket.demand else ticket.event  # ... but a demand never waits for two prefetches
                if waited is not None:
                    waited.synchronize()
                previous = ticket.event
            del ticket  # or an idle worker would keep the memory of a slot that was freed since
