"""Whether other programs want the processors that our threads wait on; if so, waits give these up at once.

Threads that share a product spin while they wait for the next one, which comes within microseconds. On a processor that
another program wants, a thread that spins is stopped for milliseconds, and so is one that has work left: then all wait
for it. Linux counts for how long a thread could have run and did not, and the thread that computes looks at that. GNU's
OpenMP spins for no more than microseconds once its threads are more than the processors: so a thread of ours keeps a
pool of its own for as long as others want them. Where the system does not count (Windows), nothing changes.

How often threads are stopped says nothing: a thread of our own that wakes for microseconds stops another one, too.
"""

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from core.system.native import openmp

LOOK_S = 0.02  # between two looks, while a model computes
REST_S = 60.0  # without a look: what was found before is forgotten
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
    """Times of the threads that compute, from the system's counts (`/proc/self/task/*/schedstat`). The files stay open:
    to open one takes twenty times as long as to read it."""

    def __init__(self, folder: Path = Path("/proc/self/task")) -> None:
        self._folder, self._counts = folder, folder.is_dir()
        self._seen: dict[int, tuple[int, Times]] = {}  # open file, and what was read last
        self._lock = threading.Lock()

    def add(self, thread: int) -> None:
        """Count a thread, by its native id, from now on."""
        if not self._counts:
            return
        with self._lock:
            if thread in self._seen:
                file, _ = self._seen[thread]
                if _read(file) is not None:
                    return
                self._forget(thread)  # another thread had the same id
            with suppress(OSError):
                file = os.open(self._folder / str(thread) / "schedstat", os.O_RDONLY)
                self._seen[thread] = file, _read(file) or (0.0, 0.0)

    def since(self) -> Times:
        """Of all threads, since the last call. A thread that ended is forgotten."""
        ran_s = waited_s = 0.0
        with self._lock:
            for thread, (file, before) in [*self._seen.items()]:
                now = _read(file)
                if now is None:
                    self._forget(thread)
                    continue
                self._seen[thread] = file, now
                ran_s += now[0] - before[0]
                waited_s += now[1] - before[1]
        return ran_s, waited_s

    def _forget(self, thread: int) -> None:
        file, _ = self._seen.pop(thread)
        os.close(file)


def _read(file: int) -> Times | None:
    try:
        ran_ns, waited_ns, *_ = map(int, os.pread(file, 128, 0).split())
    except (OSError, ValueError):
        return None  # the thread is over, or the system does not count
    return ran_ns * 1e-9, waited_ns * 1e-9


class Watch:
    """`look` is asked before helpers are woken, by the thread that computes: a thread of its own would stop one that
    spins, and on a busy machine be stopped itself while it holds Python's lock."""

    def __init__(self, times: ThreadTimes, clock: Callable[[], float] = time.monotonic) -> None:
        self.enabled = True  # False: nothing is looked at, and nothing found
        self._times, self._clock = times, clock
        self._contention, self._looked_s = Contention(times.since), 0.0
        self._lock = threading.Lock()
        self._over: threading.Event | None = None  # while others want the processors

    def computing(self) -> None:
        """A pass begins on the calling thread."""
        self.helping()
        self.look()

    def helping(self) -> None:
        """The calling thread takes part in passes of others."""
        self._times.add(threading.get_native_id())

    @property
    def contended(self) -> bool:
        """Whether others wanted the processors at the last look."""
        return self._over is not None

    def look(self) -> bool:
        """Whether others want the processors; what was seen within LOOK_S counts."""
        now_s = self._clock()
        if now_s - self._looked_s > LOOK_S and self._lock.acquire(blocking=False):
            try:
                if now_s - self._looked_s > REST_S or not self.enabled:
                    self._times.since()
                    self._contention = Contention(self._times.since)
                self._looked_s = now_s
                self._use(self._contention.look())
            finally:
                self._lock.release()
        return self.contended

    def _use(self, contended: bool) -> None:
        if contended and self._over is None:
            self._over = threading.Event()
            threading.Thread(target=_in_a_crowd, args=(self._over,), name="moestro-contention", daemon=True).start()
        elif not contended and self._over is not None:
            self._over.set()
            self._over = None


def _in_a_crowd(over: threading.Event) -> None:
    """Keep a pool of more threads than there are processors until others no longer want these."""
    openmp.stop_spinning()
    over.wait()
    openmp.stop_workers()


watch = Watch(ThreadTimes())
