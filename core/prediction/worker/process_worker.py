"""Runs a predictor's worker in its own process, so that the compute thread neither waits for it nor shares a lock with
it."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import threading
import time
from collections.abc import Sequence

from core.policy.predict.aside import Task
from core.prediction.worker.messages import write
from core.prediction.worker.process import python, start
from core.prediction.worker.ring import COUNTS, Ring, share

log = logging.getLogger("moestro.predict")
COMMAND = python("core.prediction.worker.main")
RING = 1 << 20  # bytes, for messages and for answers
SIGNS = 24  # bytes before the rings: three int64 written by the process
READY, DONE, ASLEEP = range(3)  # it works; number of messages processed; it has to be woken
SIZE = SIGNS + 2 * (COUNTS + RING)
MOST = 1024  # messages that may be queued: each may have a byte in the pipe, which must never be full
MANY = 8  # messages behind at which it is checked whether the process still runs
LOOK_S = 2.5e-4  # polling interval of the process, and of `wait`


def parts(memory: memoryview) -> tuple[memoryview, Ring, Ring]:
    """(signs, messages, answers)."""
    middle = SIGNS + COUNTS + RING
    return memory[:SIGNS].cast("q"), Ring(memory[SIGNS:middle]), Ring(memory[middle:SIZE])


class ProcessWorker:
    """A core.policy.predict.aside.AsyncWorker in its own process. It starts in the background; messages sent meanwhile
    are processed after that. When the process dies, it is logged once, and no more answers come."""

    def __init__(self, task: Task, command: Sequence[str] = COMMAND) -> None:
        self._memory, word, self._files = share(SIZE)
        self._signs, self._messages, self._answers = parts(memoryview(self._memory))
        self._given = 0
        self._closed = self._lost = self._sent = False
        self._popen: subprocess.Popen[bytes] | None = None
        self._starting = threading.Lock()
        self._thread = threading.Thread(
            target=self._start, args=(task, (*command, word)), daemon=True, name="moestro-beside"
        )
        self._thread.start()

    @property
    def ready(self) -> bool:
        """Whether the process has started, or has failed to."""
        return self._signs[READY] == 1 or self._lost

    @property
    def pid(self) -> int | None:
        """Its process id while it runs."""
        return self._popen.pid if self._popen is not None and self._popen.poll() is None else None

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
        if self._signs[ASLEEP]:
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
        if self._popen is not None:
            self._popen.kill()
        self._thread.join()
        if self._popen is not None:
            self._popen.wait()
            assert self._popen.stdin is not None
            with contextlib.suppress(OSError):
                self._popen.stdin.close()

    # ------------------------------------------------------------------ on the starting thread

    def _start(self, task: Task, command: Sequence[str]) -> None:
        try:
            with self._starting:
                if self._closed:
                    return
                self._popen = start(command, answers=False, files=self._files)
            assert self._popen.stdin is not None
            with os.fdopen(os.dup(self._popen.stdin.fileno()), "wb") as pipe:
                write(pipe, {"task": task.name, "told": dict(task.told)}, task.arrays)
            self._sent = True
        except OSError as error:
            self._say_lost(f"it could not be started: {error}")
        finally:
            for file in self._files:
                os.close(file)

    def _wake(self) -> None:
        assert self._popen is not None and self._popen.stdin is not None
        try:
            os.write(self._popen.stdin.fileno(), b"\0")
        except (OSError, ValueError) as error:  # ValueError: closed meanwhile
            self._say_lost(f"it ended ({type(error).__name__})")

    def _say_lost(self, why: str) -> None:
        if not (self._lost or self._closed):
            self._lost = True
            log.warning(
                "the process that predicts experts beside the model is gone: %s. Nothing is predicted until a "
                "predictor is chosen again.",
                why,
            )
