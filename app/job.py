"""A long job beside the chat: how far it is, how long it will still take, and how it ended."""

from __future__ import annotations

import time
from typing import Literal

from app.live import Live


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
