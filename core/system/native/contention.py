"""Whether other programs want the processors that our threads wait on; if so, waits give these up at once.

Threads that share a product spin while they wait for the next one, which comes within microseconds. On a processor that
another program wants, a thread that spins is stopped for milliseconds, and so is one that has work left: then all wait
for it. The system counts how often it stopped our threads that way, and a thread of ours looks at that while a model
computes. GNU's OpenMP spins for no more than microseconds once its threads are more than the processors: so that thread
keeps a pool of its own for as long as others want them. Where the system does not count (Windows), nothing changes.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

from core.system.native import openmp

LOOK_S = 0.02  # between two looks, while a model computes
SELDOM_S = 0.25  # the same while others want the processors: a look holds Python's lock, also where it is stopped
REST_S = 1.0  # after the last pass the watch stops
LEAST_S = 0.01  # of computing, that a rate is taken over
MANY = 40.0  # stops for each second of computing: some few are the system's own, hundreds another program's
CALM_S = 1.0  # of computing with fewer, until threads spin again


class Contention:
    """Tells from two counts, both since the process began, whether others want the processors."""

    def __init__(self, stops: Callable[[], int], computed_s: Callable[[], float]) -> None:
        """`stops`: of our threads, while they could have gone on. `computed_s`: seconds of all our threads."""
        self._stops, self._computed_s = stops, computed_s
        self._seen, self._calm_s, self.found = (stops(), computed_s()), 0.0, False

    def look(self) -> bool:
        """Whether others want the processors, by what happened since the last look."""
        stops, computed_s = self._stops() - self._seen[0], self._computed_s() - self._seen[1]
        if computed_s < LEAST_S:
            return self.found
        self._seen = self._seen[0] + stops, self._seen[1] + computed_s
        if stops > MANY * computed_s:
            self.found, self._calm_s = True, 0.0
        else:
            self._calm_s += computed_s
            self.found = self.found and self._calm_s < CALM_S
        return self.found


class Watch:
    """A thread that looks while a model computes. `contended` is read before helpers are woken."""

    def __init__(self, contention: Contention) -> None:
        self.contended = False
        self._contention, self._until_s, self._lock = contention, 0.0, threading.Lock()
        self._thread: threading.Thread | None = None

    @property
    def looks(self) -> bool:
        """Whether its thread runs."""
        return self._thread is not None

    def computing(self) -> None:
        """A pass begins."""
        self._until_s = time.monotonic() + REST_S
        if self._thread is None:
            with self._lock:
                if self._thread is None:
                    self._thread = threading.Thread(target=self._look, name="moestro-contention", daemon=True)
                    self._thread.start()

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


def _stops() -> int:
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


watch = Watch(Contention(_stops if os.name == "posix" else lambda: 0, time.process_time))
