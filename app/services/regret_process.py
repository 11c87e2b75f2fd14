"""The application's side of the shadow caches' process: starts it, exchanges messages, ends it."""

from __future__ import annotations

import contextlib
import subprocess
import threading
from collections.abc import Sequence
from typing import BinaryIO, cast

from core.prediction.worker.messages import Arrays, Head, read, write
from core.prediction.worker.process import python, start

COMMAND = python("app.services.regret_worker")
GONE_S = 2.0


class Lost(Exception):
    """The process ended, could not be started, or failed a request. The message is for the log."""


class Process:
    """One running process. Call `ask` from one thread; `kill` from any, which makes a waiting `ask` raise Lost."""

    def __init__(self, command: Sequence[str] = COMMAND) -> None:
        """Raises Lost when it cannot be started."""
        try:
            self._popen = start(command, answers=True)
        except OSError as error:
            raise Lost(f"it could not be started: {error}") from error
        self._to, self._from = cast(BinaryIO, self._popen.stdin), cast(BinaryIO, self._popen.stdout)
        self._ending = threading.Lock()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._popen.pid

    def ask(self, head: Head, arrays: Arrays | None = None) -> Head:
        """Send a message and wait for the answer. Raises Lost."""
        try:
            write(self._to, head, arrays)
            answer = read(self._from)[0]
        except (OSError, EOFError, ValueError) as error:  # ValueError: the pipe was closed meanwhile
            raise Lost(f"it ended ({type(error).__name__} {error})") from error
        if answer["problem"]:
            raise Lost(answer.get("details") or answer["problem"])
        return answer

    def kill(self) -> None:
        """Kill it now; `end` reaps it."""
        with contextlib.suppress(OSError):
            self._popen.kill()

    def end(self) -> None:
        """End it if it still runs, and release its resources. A second call does nothing."""
        with self._ending:
            with contextlib.suppress(OSError, ValueError):
                self._to.close()
            try:
                self._popen.wait(GONE_S)
            except subprocess.TimeoutExpired:
                self.kill()
                self._popen.wait()
            self._from.close()
