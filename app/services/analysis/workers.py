"""Work in other processes, several pieces at once, that can be stopped at any moment."""

from __future__ import annotations

import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import wait
from typing import Any

import psutil

from core.errors import MoestroError

POLL_S = 0.1
DIED = (
    "A process that was simulating ended by itself; most likely memory ran out. Try again with fewer sizes or a "
    "shorter trace."
)


class Stopped(MoestroError):
    """It was asked to stop."""


@dataclass(frozen=True, slots=True)
class Task:
    """A function of some module and its arguments: both travel to the other process, and the result comes back."""

    work: Callable[..., Any]
    arguments: tuple[Any, ...] = ()


def run(tasks: Sequence[Task], cancel: threading.Event, done: Callable[[int, Any], object], processes: int = 0) -> None:
    """Do all tasks, each in a process other than this one; `done(place in tasks, result)` as they end, in this thread.

    `processes` at once, 0 = one per CPU core; they are of low priority, so that an answer being written goes first.
    Raises Stopped soon after `cancel` is set, and what a task raises if it is a MoestroError; then all are ended.
    """
    context, waiting = get_context("spawn"), deque(enumerate(tasks))
    workers: list[tuple[Any, Any]] = []
    busy: dict[Any, int] = {}
    try:
        for _ in range(min(processes or os.cpu_count() or 1, len(tasks))):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,), name="moestro-simulate", daemon=True)
            process.start()
            theirs.close()
            workers.append((process, ours))
            _give(ours, waiting, busy)
        while busy:
            if cancel.is_set():
                raise Stopped("Stopped.")
            for pipe in wait(list(busy), POLL_S):
                at, result, error = _answer(pipe)
                if error is not None:
                    raise error
                del busy[pipe]
                _give(pipe, waiting, busy)
                done(at, result)
    finally:
        for process, pipe in workers:
            process.terminate()
            pipe.close()
        for process, _ in workers:
            process.join()
            process.close()


def here(
    tasks: Sequence[Task], cancel: threading.Event, done: Callable[[int, Any], object], processes: int = 1
) -> None:
    """The same in this thread, for what takes less time than starting a process. Stops between two tasks."""
    for at, task in enumerate(tasks):
        if cancel.is_set():
            raise Stopped("Stopped.")
        done(at, task.work(*task.arguments))


def _give(pipe: Any, waiting: deque[tuple[int, Task]], busy: dict[Any, int]) -> None:
    if waiting:
        at, task = waiting.popleft()
        busy[pipe] = at
        with suppress(OSError):  # it died already: reading from it says so
            pipe.send((at, task))


def _answer(pipe: Any) -> tuple[int, Any, Exception | None]:
    try:
        at, result, error = pipe.recv()
    except (EOFError, OSError):
        return -1, None, MoestroError(DIED)
    return at, result, error


def _serve(pipe: Any) -> None:
    """The other process: one task after the other until nobody asks any more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer; it ends this one
    with suppress(psutil.Error, OSError):
        psutil.Process().nice(getattr(psutil, "BELOW_NORMAL_PRIORITY_CLASS", 10))  # the name exists on Windows alone
    with suppress(EOFError, OSError):
        while True:
            at, task = pipe.recv()
            try:
                reply: tuple[int, Any, Exception | None] = at, task.work(*task.arguments), None
            except Exception as error:
                reply = at, None, error
            pipe.send(reply)
