"""Locks, conditions, events, queues and threads in the place of Python's, which pass knowledge between host threads."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

from tests.fake_cuda.clocks import Clock, Clocks, merge


class Passed:
    """What one thread knew and another one learns. `tell` before a lock is released, `learn` once it is taken."""

    def __init__(self, clocks: Clocks) -> None:
        self._clocks = clocks
        self._known: Clock = {}

    def tell(self) -> None:
        with self._clocks.lock:
            merge(self._known, self._clocks.host)

    def learn(self) -> None:
        with self._clocks.lock:
            merge(self._clocks.host, self._known)


class TracedCondition(threading.Condition):
    def __init__(self, clocks: Clocks) -> None:
        super().__init__()
        self._passed = Passed(clocks)

    def __enter__(self) -> bool:
        entered = super().__enter__()
        self._passed.learn()
        return entered

    def __exit__(self, *error: Any) -> None:
        self._passed.tell()
        super().__exit__(*error)

    def wait(self, timeout: float | None = None) -> bool:
        self._passed.tell()
        notified = super().wait(timeout)
        self._passed.learn()
        return notified


class TracedEvent(threading.Event):
    def __init__(self, clocks: Clocks) -> None:
        super().__init__()
        self._passed = Passed(clocks)

    def set(self) -> None:
        self._passed.tell()
        super().set()

    def is_set(self) -> bool:
        return self._learned(super().is_set())

    def wait(self, timeout: float | None = None) -> bool:
        return self._learned(super().wait(timeout))

    def _learned(self, found: bool) -> bool:
        if found:
            self._passed.learn()
        return found


class TracedLock:
    def __init__(self, clocks: Clocks) -> None:
        self._lock, self._passed = threading.Lock(), Passed(clocks)

    def __enter__(self) -> None:
        self._lock.acquire()
        self._passed.learn()

    def __exit__(self, *error: object) -> None:
        self._passed.tell()
        self._lock.release()


class TracedThread(threading.Thread):
    def __init__(self, clocks: Clocks, **values: Any) -> None:
        super().__init__(**values)
        self._passed = Passed(clocks)

    def run(self) -> None:
        try:
            super().run()
        finally:
            self._passed.tell()

    def join(self, timeout: float | None = None) -> None:
        super().join(timeout)
        self._passed.learn()


def traced_threading(clocks: Clocks) -> SimpleNamespace:
    """What modules use of `threading`, passing knowledge between threads."""
    traced = {"Condition": TracedCondition, "Event": TracedEvent, "Lock": TracedLock, "Thread": TracedThread}
    return SimpleNamespace(**{name: partial(kind, clocks) for name, kind in traced.items()})


def traced_queue(clocks: Clocks) -> Callable[[], Any]:
    """queue.SimpleQueue, passing knowledge with what it holds."""

    class SimpleQueue:
        def __init__(self) -> None:
            self._queue: queue.SimpleQueue[tuple[Passed, Any]] = queue.SimpleQueue()

        def __class_getitem__(cls, item: object) -> Any:
            return cls

        def put(self, item: Any) -> None:
            passed = Passed(clocks)
            passed.tell()
            self._queue.put((passed, item))

        def get(self) -> Any:
            passed, item = self._queue.get()
            passed.learn()
            return item

    return SimpleQueue
