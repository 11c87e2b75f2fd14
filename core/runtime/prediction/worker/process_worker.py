"""Runs a predictor's worker in its own process, so that the compute thread neither waits for it nor shares a lock with
it."""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections.abc import Callable
from multiprocessing.sharedctypes import RawArray
from typing import Any

from core.policy.predict.worker import WorkerTask
from core.runtime.prediction.worker import main
from core.runtime.prediction.worker.memory import ASLEEP, DONE, LOOK_S, READY, SIZE, parts
from core.system.worker_process import WorkerProcess

log = logging.getLogger("moestro.predict")
MOST = 1024  # messages that may be queued
MANY = 8  # messages behind at which it is checked whether the process still runs
NICENESS = 5  # late results are useless, so the priority is only moderately lowered


class ProcessWorker:
    """A core.policy.predict.worker.AsyncWorker in its own process. It starts in the background; messages sent meanwhile
    are processed after that. When the process dies, it is logged once, and no more answers come."""

    def __init__(self, task: WorkerTask, work: Callable[..., object] = main.serve) -> None:
        memory = RawArray(ctypes.c_byte, SIZE)
        self._signs, self._messages, self._answers = parts(memory)
        self._given = self._woken = 0
        self._closed = self._lost = self._sent = False
        self._process: WorkerProcess | None = None
        self._starting = threading.Lock()
        self._thread = threading.Thread(
            target=self._start, args=(task, work, memory), daemon=True, name="moestro-beside"
        )
        self._thread.start()

    @property
    def ready(self) -> bool:
        """Whether the process has started, or has failed to."""
        return self._signs[READY] == 1 or self._lost

    @property
    def pid(self) -> int | None:
        """Its process id while it runs."""
        return self._process.pid if self._process is not None else None

    @property
    def behind(self) -> int:
        count = 0 if self._lost else self._given - self._signs[DONE]
        if count > MANY and self._signs[READY] and self.pid is None:
            self._say_lost("it ended")
            return 0
        return count

    def give(self, message: bytes) -> None:
        """Dropped when too many messages are queued already."""
        if self._closed or self._lost or self.behind >= MOST or not self._messages.put(message):
            return
        self._given += 1
        if (asleep := self._signs[ASLEEP]) and asleep != self._woken:
            self._woken = asleep  # once a sleep, or the pipe might be full
            self._wake()

    def take(self) -> list[bytes]:
        answers: list[bytes] = []
        while (answer := self._answers.get()) is not None:
            answers.append(answer)
        return answers

    def wait(self) -> list[bytes]:
        answers: list[bytes] = []
        while self.behind > 0 and not self._closed:
            answers += self.take()
            if self._sent and self.pid is None:
                self._say_lost("it ended")
            time.sleep(LOOK_S)
        return answers + self.take()

    def close(self) -> None:
        with self._starting:
            self._closed = True
        if self._process is not None:
            self._process.kill()
        self._thread.join()
        if self._process is not None:
            self._process.end()

    # ------------------------------------------------------------------ on the starting thread

    def _start(self, task: WorkerTask, work: Callable[..., object], memory: Any) -> None:
        try:
            with self._starting:
                if self._closed:
                    return
                self._process = WorkerProcess(work, memory, niceness=NICENESS)
            self._process.pipe.send(task)
            self._sent = True
        except OSError as error:
            self._say_lost(f"it could not be started: {error}")

    def _wake(self) -> None:
        assert self._process is not None
        try:
            self._process.pipe.send_bytes(b"\0")
        except OSError as error:  # also when the pipe was closed meanwhile
            self._say_lost(f"it ended ({type(error).__name__})")

    def _say_lost(self, why: str) -> None:
        if not (self._lost or self._closed):
            self._lost = True
            log.warning(
                "the predictor's worker process died: %s. Nothing is predicted until a predictor is chosen again.",
                why,
            )
