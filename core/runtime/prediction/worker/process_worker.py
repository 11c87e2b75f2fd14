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
NICENESS = 5  # late results are useless, so the priority is only moderately lowered


class ProcessWorker:
    """A core.policy.predict.worker.AsyncWorker in its own process. It starts in the background; messages sent before
    that are processed after it. When the process dies, it is logged once, and no more answers come.

    `on_answer` is called for each answer, on a thread of its own, once the answer can be taken.
    """

    def __init__(
        self, task: WorkerTask, work: Callable[..., object] = main.serve, on_answer: Callable[[], None] = lambda: None
    ) -> None:
        memory = RawArray(ctypes.c_byte, SIZE)
        self._signs, self._messages, self._answers = parts(memory)
        self._given = self._woken = 0
        self._closed = self._lost = False
        self._process: WorkerProcess | None = None
        self._lock, self._on_answer = threading.Lock(), on_answer  # of `_closed`, `_lost`, and the start
        self._thread = threading.Thread(
            target=self._run, args=(task, work, memory), daemon=True, name="moestro-predictions"
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
        return 0 if self._lost else self._given - self._signs[DONE]

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
            time.sleep(LOOK_S)
        return answers + self.take()

    def close(self) -> None:
        with self._lock:
            self._closed = True
        if self._process is not None:
            self._process.kill()
        self._thread.join()
        if self._process is not None:
            self._process.end()

    # ------------------------------------------------------------------ on its own thread

    def _run(self, task: WorkerTask, work: Callable[..., object], memory: Any) -> None:
        """Start the process, then hear of its answers until it ends."""
        try:
            with self._lock:
                if self._closed:
                    return
                process = self._process = WorkerProcess(work, memory, niceness=NICENESS)
            process.pipe.send(task)
        except OSError as error:
            self._say_lost(f"it could not be started: {error}")
            return
        while True:
            try:
                process.pipe.recv_bytes()
            except (EOFError, OSError):
                self._say_lost("it ended")
                return
            self._on_answer()

    # ------------------------------------------------------------------ on the computing thread

    def _wake(self) -> None:
        assert self._process is not None
        try:
            self._process.pipe.send_bytes(b"\0")
        except OSError as error:
            self._say_lost(f"it ended ({type(error).__name__})")

    # ------------------------------------------------------------------ on either

    def _say_lost(self, why: str) -> None:
        with self._lock:
            if self._lost or self._closed:
                return
            self._lost = True
        log.warning(
            "the predictor's worker process died: %s. Nothing is predicted until a predictor is chosen again.", why
        )
