"""The application's end of the shadows' process: starts it, asks it, ends it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, cast

from app import regret_worker as wire

ROOT = Path(__file__).resolve().parent.parent
COMMAND = (sys.executable, "-m", "app.regret_worker")
LOW = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}  # no idle helpers of numpy's
FLAGS = getattr(subprocess, "BELOW_NORMAL_PRIORITY_CLASS", 0) | getattr(subprocess, "CREATE_NO_WINDOW", 0)
GONE_S = 2.0


class Lost(Exception):
    """The process ended, or could not be started, or could not do what it was asked. Its text is for the log."""


class Process:
    """One running process. `ask` is for one thread; `kill` may come from any, and makes a waiting `ask` raise Lost."""

    def __init__(self, command: Sequence[str] = COMMAND) -> None:
        """Raises Lost when it cannot be started."""
        try:
            self._popen = subprocess.Popen(list(command), cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                           env={**os.environ, **LOW}, creationflags=FLAGS)
        except OSError as error:
            raise Lost(f"it could not be started: {error}") from error
        self._to, self._from = cast(BinaryIO, self._popen.stdin), cast(BinaryIO, self._popen.stdout)
        self._ending = threading.Lock()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._popen.pid

    def ask(self, head: wire.Head, arrays: wire.Arrays | None = None) -> wire.Head:
        """Send a message and wait for the answer. Raises Lost."""
        try:
            wire.write(self._to, head, arrays)
            answer = wire.read(self._from)[0]
        except (OSError, EOFError, ValueError) as error:   # ValueError: a pipe closed meanwhile
            raise Lost(f"it ended ({type(error).__name__} {error})") from error
        if answer["problem"]:
            raise Lost(answer.get("details") or answer["problem"])
        return answer

    def kill(self) -> None:
        """End it now. The system forgets it once `end` was called."""
        with contextlib.suppress(OSError):
            self._popen.kill()

    def end(self) -> None:
        """End it, if it has not ended, and leave nothing behind. A second call does nothing."""
        with self._ending:
            with contextlib.suppress(OSError, ValueError):
                self._to.close()
            try:
                self._popen.wait(GONE_S)
            except subprocess.TimeoutExpired:
                self.kill()
                self._popen.wait()
            self._from.close()
