"""A long job: its progress, remaining time, outcome, and the thread it runs in."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any, Literal

from app.services.progress import Live
from core.errors import MoestroError

log = logging.getLogger("moestro.app")


class Job(Live):
    """A job in progress, or the outcome of the last one."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.state: Literal["running", "done", "error", "cancelled"] = "running"
        self.text = text
        self.share = 0.0
        self.left_s: float | None = None
        self._began_s = time.monotonic()

    @property
    def finished(self) -> bool:
        return self.state != "running"

    def progress(self, text: str, share: float) -> None:
        """Record the progress, and estimate the remaining time."""
        took, share = time.monotonic() - self._began_s, min(1.0, max(0.0, share))
        left = took / share * (1 - share) if share > 0.03 and took > 1 else None
        self.update(text=text, share=share, left_s=left)

    def end(self, **fields: Any) -> None:
        """Mark the job as ended with this outcome."""
        self.update(left_s=None, **fields)


def outcome(
    job: Job, work: Callable[[], dict[str, Any]], done: str, undone: str, about: str, unexpected: str
) -> dict[str, Any]:
    """Run a job's work; returns the fields of its outcome. `work` returns additional ones. An error is logged and
    reported as display text: `undone` = short description, `unexpected` = for errors other than MoestroError, `about` =
    the object.
    """
    try:
        return {"state": "done", "text": done, "share": 1.0, **work()}
    except Exception as error:
        if job.cancelled.is_set():
            return {"state": "cancelled", "text": "Cancelled"}
        if isinstance(error, MoestroError):
            log.info("%s: %s: %s", about, undone, error)
            return {"state": "error", "text": undone, "error": str(error)}
        log.exception("%s: %s: unexpected error", about, undone)
        return {"state": "error", "text": undone, "error": unexpected}


class Thread:
    """A thread that runs one job at a time."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None

    def run(self, name: str, work: Callable[..., None], *args: object) -> None:
        """Start; the previous job must have ended."""
        self._thread = threading.Thread(target=work, args=args, name=f"moestro-{name}", daemon=True)
        self._thread.start()

    def join(self, timeout: float) -> None:
        """Wait for the running job."""
        if self._thread is not None:
            self._thread.join(timeout)
