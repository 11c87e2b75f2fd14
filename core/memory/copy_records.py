"""Records of copies: which ended, how long they took, and how long the compute stream waited for them."""

from collections import deque
from statistics import median
from typing import Any

from core.memory.ticket import Ticket

SPANS = 64  # number of recent copy times kept
GROWS = 1.01  # with each copy, what the fastest one lately took


class CopyRecords:
    """What is known of copies until it is taken."""

    def __init__(self, *, cuda: bool) -> None:
        self._cuda = cuda
        self._spans: deque[float] = deque(maxlen=SPANS)  # of the last copies, seconds per byte
        self._byte_s = 0.0  # their median
        self._finished: deque[Ticket] = deque(maxlen=65536)
        self._stalls: list[tuple[Any, Any, bool]] = []
        self._place_s = 0.0  # of a byte out of host memory into a slot on a CPU, undisturbed; 0 = not known

    def placed(self, size_bytes: int, seconds: float) -> None:
        """A copy out of host memory into a slot on a CPU took so long."""
        place_s = seconds / size_bytes
        self._place_s = min(place_s, GROWS * self._place_s or place_s)

    def placing_s(self, size_bytes: int) -> float:
        """Seconds that such a copy takes undisturbed; 0 before the first."""
        return size_bytes * self._place_s

    def take_finished(self) -> list[Ticket]:
        """Copies completed since the last call, each returned once; on CUDA their durations come from the device's
        events."""
        taken: list[Ticket] = []
        if not self._finished:
            return taken
        while self._finished:
            ticket = self._finished[0]
            if self._cuda and ticket.error is None:
                if not ticket.event.query():
                    break
                seconds = ticket.begin.elapsed_time(ticket.event) / 1e3
                ticket.landed_s = max(ticket.landed_s, ticket.started_s + seconds)
            taken.append(self._finished.popleft())
        if taken:
            self._spans.extend([(ticket.landed_s - ticket.started_s) / ticket.bytes for ticket in taken])
            self._byte_s = median(self._spans)
        return taken

    def untaken_bytes(self) -> tuple[int, int]:
        """(payload, bytes read from disk) of the copies that `take_finished` will return; of any thread."""
        done = [ticket for ticket in list(self._finished) if ticket.error is None]
        return sum(ticket.bytes for ticket in done), sum(ticket.disk_bytes for ticket in done)

    def forget(self) -> None:
        """Drop the records of copies and stalls so far."""
        self._finished.clear()
        self._stalls.clear()

    def set_aside(self) -> tuple[deque[Ticket], list[tuple[Any, Any, bool]]]:
        """Return the records of copies and stalls, for `put_back`, and start empty ones. Only while no copy is in
        flight."""
        noted = self._finished, self._stalls
        self._finished, self._stalls = deque(maxlen=65536), []
        return noted

    def put_back(self, noted: tuple[deque[Ticket], list[tuple[Any, Any, bool]]]) -> None:
        """Restore the records that `set_aside` returned, dropping those made since."""
        self._finished, self._stalls = noted

    def device_stall_s(self) -> tuple[float, float]:
        """Seconds that the compute stream has waited for copies since the last call, and how much of that for late
        prefetches. What it still waits for counts later."""
        if not self._stalls:
            return 0.0, 0.0
        stalls = [one for one in self._stalls if one[1].query()]
        self._stalls = [one for one in self._stalls if one not in stalls]
        waited = [(float(before.elapsed_time(after)) / 1e3, demand) for before, after, demand in stalls]
        return sum(s for s, _ in waited), sum(s for s, demand in waited if not demand)
