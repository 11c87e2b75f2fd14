"""Runs tasks in several other processes at once, or here; both can be stopped."""

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from core.errors import MoestroError
from core.system.worker_process import WorkerProcess

POLL_S = 0.1
DIED = "A simulation process died, most likely because memory ran out. Try again with fewer sizes or a shorter trace."
NICENESS = 10


class Stopped(MoestroError):
    """The work was cancelled."""


@dataclass(frozen=True, slots=True)
class Task:
    """A module-level function and its arguments; both are sent to the other process, and the result is sent back."""

    work: Callable[..., Any]
    arguments: tuple[Any, ...] = ()


def run(tasks: Sequence[Task], processes: int = 0, cancel: threading.Event | None = None) -> Iterator[tuple[int, Any]]:
    """Run all tasks in other processes; yields (index of the task, result) as each ends.

    `processes` at once, 0 = one per CPU core, at low priority so that answers being written go first. Raises Stopped
    soon after `cancel` is set, and a MoestroError that a task raises. All processes have ended when the iterator has,
    or when it is closed.
    """
    waiting = deque(enumerate(tasks))
    workers: list[WorkerProcess] = []
    busy: dict[Any, int] = {}  # pipe -> index of its task
    try:
        for _ in range(min(processes or os.cpu_count() or 1, len(tasks))):
            workers.append(WorkerProcess(_serve, niceness=NICENESS))
            _give(workers[-1].pipe, waiting, busy)
        while busy:
            if cancel is not None and cancel.is_set():
                raise Stopped("Stopped.")
            for pipe in wait(list(busy), POLL_S):
                at, result, error = _answer(pipe)
                if error is not None:
                    raise error
                del busy[pipe]
                _give(pipe, waiting, busy)
                yield at, result
    finally:
        for worker in workers:
            worker.kill()
        for worker in workers:
            worker.end()


def here(tasks: Sequence[Task], processes: int = 1, cancel: threading.Event | None = None) -> Iterator[tuple[int, Any]]:
    """Like `run`, but in this thread, for work shorter than starting a process. Stops between two tasks."""
    for at, task in enumerate(tasks):
        if cancel is not None and cancel.is_set():
            raise Stopped("Stopped.")
        yield at, task.work(*task.arguments)


def _give(pipe: Any, waiting: deque[tuple[int, Task]], busy: dict[Any, int]) -> None:
    if waiting:
        at, task = waiting.popleft()
        busy[pipe] = at
        with suppress(OSError):  # it has died already: reading from it will report that
            pipe.send((at, task))


def _answer(pipe: Any) -> tuple[int, Any, Exception | None]:
    try:
        at, result, error = pipe.recv()
    except (EOFError, OSError):
        return -1, None, MoestroError(DIED)
    return at, result, error


def _serve(pipe: Connection) -> None:
    """Main loop of the worker process: runs tasks until the pipe closes."""
    while True:
        at, task = pipe.recv()
        try:
            reply: tuple[int, Any, Exception | None] = at, task.work(*task.arguments), None
        except Exception as error:
            reply = at, None, error
        pipe.send(reply)
