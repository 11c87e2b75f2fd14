"""The application's side of the shadow caches' process: starts it, asks it, ends it."""

from __future__ import annotations

from typing import Any

from app.services.regret_worker import Arrays, Head, serve
from core.system.worker_process import WorkerProcess

GONE_S = 2.0


class Lost(Exception):
    """The process ended, could not be started, or failed a request. The message is for the log."""


class Process:
    """One running process. Call `ask` from one thread; `kill` from any, which makes a waiting `ask` raise Lost."""

    def __init__(self) -> None:
        """Raises Lost when it cannot be started."""
        try:
            self._worker = WorkerProcess(serve)
        except OSError as error:
            raise Lost(f"it could not be started: {error}") from error

    @property
    def pid(self) -> int | None:
        """Its process id while it runs."""
        return self._worker.pid

    def ask(self, head: Head, arrays: Arrays | None = None) -> dict[str, Any]:
        """Send a message and wait for the answer. Raises Lost."""
        try:
            self._worker.pipe.send((head, arrays or {}))
            answer: dict[str, Any] = self._worker.pipe.recv()
        except (OSError, EOFError) as error:  # OSError also when the pipe was closed meanwhile
            raise Lost(f"it ended ({type(error).__name__} {error})") from error
        if answer["problem"]:
            raise Lost(answer.get("details") or answer["problem"])
        return answer

    def kill(self) -> None:
        """Kill it now; `end` reaps it."""
        self._worker.kill()

    def end(self) -> None:
        """End it if it still runs, and release its resources. A second call does nothing."""
        self._worker.end(GONE_S)
