"""A long job beside the chat: how far it is, how long it will still take, how it ended, and the thread it runs in."""

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
    """In progress, or how the last one ended."""

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
        """Take note of how far it is, and work out how long it will still take."""
        took, share = time.monotonic() - self._began_s, min(1.0, max(0.0, share))
        left = took / share * (1 - share) if share > 0.03 and took > 1 else None
        self.update(text=text, share=share, left_s=left)

    def end(self, **fields: Any) -> None:
        """It is over, like this."""
        self.update(left_s=None, **fields)


def outcome(
    job: Job, work: Callable[[], dict[str, Any]], done: str, undone: str, about: str, unexpected: str
) -> dict[str, Any]:
    """Do the work of a job; the fields it ends with. `work` returns more of them; what it raises is told in the user's
    words, and in the log: `undone` in short, `unexpected` where it was no MoestroError, `about` = of what."""
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
    """The thread of whoever does one job at a time."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None

    def run(self, name: str, work: Callable[..., None], *args: object) -> None:
        """Begin; the one before has ended."""
        self._thread = threading.Thread(target=work, args=args, name=f"moestro-{name}", daemon=True)
        self._thread.start()

    def join(self, timeout: float) -> None:
        """Wait for what is running."""
        if self._thread is not None:
            self._thread.join(timeout)
