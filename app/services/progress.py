"""Things in progress that several tabs may follow: an answer being written, a model being loaded.

Whoever works on one calls `update`; whoever shows it calls `wait(version)` and reads the fields. Fields are replaced
whole, never mutated, so a reader sees each field as it was at some update.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Literal

from core.types import AnswerStats


class Live(ABC):
    """State with a version that counts its updates."""

    def __init__(self) -> None:
        self.version = 0
        self.error = ""  # in the user's words; "" while all is well
        self.cancelled = threading.Event()
        self._news = threading.Condition()
        self._watchers: list[Callable[[], None]] = []

    @property
    @abstractmethod
    def finished(self) -> bool:
        """Nothing more will change."""

    def update(self, **fields: Any) -> None:
        """Set some fields and wake everybody who waits."""
        with self._news:
            for name, value in fields.items():
                if not hasattr(self, name):
                    raise AttributeError(f"{type(self).__name__} has no {name}")
                setattr(self, name, value)
            self.version += 1
            self._news.notify_all()
            for wake in self._watchers:
                wake()

    def watch(self, wake: Callable[[], None]) -> None:
        """Have `wake` called at every update, on the thread that updates, which it must not hold up."""
        with self._news:
            self._watchers.append(wake)

    def unwatch(self, wake: Callable[[], None]) -> None:
        """End `watch`."""
        with self._news:
            self._watchers.remove(wake)

    def wait(self, version: int, timeout: float | None = None) -> int:
        """Block until there is news since `version`, or it is finished, or `timeout` s passed; returns the version."""
        with self._news:
            self._news.wait_for(lambda: self.version != version or self.finished, timeout)
            return self.version

    def join(self, timeout: float | None = None) -> bool:
        """Block until finished, at most `timeout` seconds; returns whether it is."""
        with self._news:
            return self._news.wait_for(lambda: self.finished, timeout)


class Answer(Live):
    """An answer being written. `chat_id` is None for one that belongs to no chat (the HTTP API's).

    `undone` tells that it failed (or was stopped) before its first token and that the chat is as if it had never been
    asked: put the user's text back into the input box and show `error`.
    """

    def __init__(self, chat_id: int | None, message_id: int | None) -> None:
        super().__init__()
        self.chat_id, self.message_id = chat_id, message_id
        self.state: Literal["queued", "prefill", "streaming", "done", "error"] = "queued"
        self.text = ""
        self.prefill_done = 0  # prompt positions computed ...
        self.prefill_total = 0  # ... of so many
        self.n_tokens = 0
        self.stats: AnswerStats | None = None
        self.undone = False
        self.refused = False  # it failed for what was asked, not for what went wrong here
        self.unrecorded = 0  # passes whose record the store had no room for
        self.unsaved = ""  # why the store lacks some of it, in the user's words; it is tried again
        self.asked_s = time.perf_counter()
        self.ttft_ms = 0.0  # from its turn to its first token; 0 = none yet
        self.queued_ms = 0.0  # waited behind other answers before its prefill began

    @property
    def finished(self) -> bool:
        return self.state in ("done", "error")


class Loading(Live):
    """A model being loaded. `share` is 0..1; `text` says what is being done. Kept after its end for the last word."""

    def __init__(self, model: str) -> None:
        super().__init__()
        self.model = model
        self.state: Literal["loading", "done", "error", "cancelled"] = "loading"
        self.text = "Checking that it fits"
        self.share = 0.0

    @property
    def finished(self) -> bool:
        return self.state != "loading"

    def progress(self, text: str, share: float) -> None:
        """Take note of what is being done, and how far it is."""
        self.update(text=text, share=min(1.0, max(0.0, share)))
