"""Whether other programs want the processors that our threads wait on; if so, waits give these up at once.

Threads that share a product spin while they wait for the next one, which comes within microseconds. On a processor that
another program wants, a thread that spins is stopped for milliseconds, and so is one that has work left: then all wait
for it. Linux counts for how long a thread could have run and did not, and a thread of ours looks at that while a model
computes. GNU's OpenMP spins for no more than microseconds once its threads are more than the processors: so that thread
keeps a pool of its own for as long as others want them. Where the system does not count (Windows), nothing changes.

How often threads are stopped says nothing: a thread of our own that wakes for microseconds stops another one, too.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from core.system.native import openmp

LOOK_S = 0.02  # between two looks, while a model computes
SELDOM_S = 0.25  # the same while others want the processors: a look holds Python's lock, also where it is stopped
REST_S = 1.0  # after the last pass the watch stops
LEAST_S = 0.05  # of running and waiting, that a share is taken over
MANY, FEW = 0.2, 0.05  # share of waiting: from which on others want the processors, and below which they do not
CALM_S = 1.0  # of running with little waiting, until threads spin again

Times = tuple[float, float]  # seconds that threads ran, and seconds that they could have run and waited


class Contention:
    """Tells from how long our threads ran and waited whether others want the processors."""

    def __init__(self, times: Callable[[], Times]) -> None:
        """`times`: since it was called the last time."""
        self._times = times
        self._ran_s = self._waited_s = self._calm_s = 0.0
        self.found = False

    def look(self) -> bool:
        """Whether others want the processors, by what happened since the last look."""
        ran_s, waited_s = self._times()
        self._ran_s += ran_s
        self._waited_s += waited_s
        total_s = self._ran_s + self._waited_s
        if total_s < LEAST_S:
            return self.found
        share = self._waited_s / total_s
        if share > MANY:
            self.found, self._calm_s = True, 0.0
        elif share < FEW:
            self._calm_s += self._ran_s
            self.found = self.found and self._calm_s < CALM_S
        self._ran_s = self._waited_s = 0.0
        return self.found


class ThreadTimes:
    """Times of the threads that compute, from the system's counts (`/proc/self/task/*/schedstat`)."""

    def __init__(self, folder: Path = Path("/proc/self/task")) -> None:
        self._folder, self._counts = folder, folder.is_dir()
        self._seen: dict[int, Times] = {}
        self._lock = threading.Lock()

    def add(self, thread: int) -> None:
        """Count a thread, by its native id, from now on."""
        if self._counts and thread not in self._seen:
            with self._lock:
                self._seen[thread] = self._read(thread) or (0.0, 0.0)

    def since(self) -> Times:
        """Of all threads, since the last call. A thread that ended is forgotten."""
        ran_s = waited_s = 0.0
        with self._lock:
            for thread, before in [*self._seen.items()]:
                now = self._read(thread)
                if now is None:
                    del self._seen[thread]
                    continue
                self._seen[thread] = now
                ran_s += max(0.0, now[0] - before[0])  # less where the system gave the id to another thread
                waited_s += max(0.0, now[1] - before[1])
        return ran_s, waited_s

    def _read(self, thread: int) -> Times | None:
        try:
            ran_ns, waited_ns, *_ = map(int, (self._folder / str(thread) / "schedstat").read_text("ascii").split())
        except (OSError, ValueError):
            return None  # the thread is over, or the system does not count
        return ran_ns * 1e-9, waited_ns * 1e-9


class Watch:
    """A thread that looks while a model computes. `contended` is read before helpers are woken."""

    def __init__(self, times: ThreadTimes) -> None:
        self.contended = False
        self._times, self._contention = times, Contention(times.since)
        self._until_s, self._lock = 0.0, threading.Lock()
        self._thread: threading.Thread | None = None

    @property
    def looks(self) -> bool:
        """Whether its thread runs."""
        return self._thread is not None

    def computing(self) -> None:
        """A pass begins on the calling thread."""
        self.helping()
        self._until_s = time.monotonic() + REST_S
        if self._thread is None:
            with self._lock:
                if self._thread is None:
                    self._thread = threading.Thread(target=self._look, name="moestro-contention", daemon=True)
                    self._thread.start()

    def helping(self) -> None:
        """The calling thread takes part in passes of others."""
        self._times.add(threading.get_native_id())

    def _look(self) -> None:
        while True:
            while time.monotonic() < self._until_s:
                self._use(self._contention.look())
                time.sleep(SELDOM_S if self.contended else LOOK_S)
            with self._lock:
                if time.monotonic() >= self._until_s:
                    self._use(False)
                    self._thread = None
                    return

    def _use(self, contended: bool) -> None:
        if contended != self.contended:
            openmp.stop_spinning() if contended else openmp.stop_workers()
            self.contended = contended


watch = Watch(ThreadTimes())
