"""A thread of its own for what a predictor works out beside the pass, so that no layer waits for it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")


class Aside(Generic[T]):
    """Jobs run one after the other in the order given; their results are taken when they are there.

    Given and taken by one thread. What a job raises is raised by the next `take` or `wait`. `close` may be called
    twice; jobs that have not started are then dropped.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: SimpleQueue[Callable[[], T] | threading.Event | None] = SimpleQueue()
        self._done: deque[T] = deque()
        self._failed: deque[BaseException] = deque()
        self._closed = False
        self._thread: threading.Thread | None = None

    def do(self, job: Callable[[], T]) -> None:
        """Have it done some time."""
        if self._thread is None and not self._closed:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        self._jobs.put(job)

    def take(self) -> list[T]:
        """Results since the last call, in order. Never waits."""
        if self._failed:
            raise self._failed.popleft()
        return [self._done.popleft() for _ in range(len(self._done))]

    def wait(self) -> list[T]:
        """The same, once everything given is done."""
        if self._thread is not None and not self._closed:
            reached = threading.Event()
            self._jobs.put(reached)
            reached.wait()
        return self.take()

    def close(self) -> None:
        """Stop after the job at hand."""
        self._closed = True
        self._jobs.put(None)
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            if isinstance(job, threading.Event):
                job.set()
            elif not self._closed:
                try:
                    self._done.append(job())
                except BaseException as error:
                    self._failed.append(error)
