"""State of work that several tabs may follow: an answer being written, a long job.

The worker calls `update`; a follower calls `wait(version)` and reads the fields. Fields are replaced whole, never
mutated, so a reader sees each field as of some update."""

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Literal

from core.types import AnswerStats, TokenLogprob


class Live(ABC):
    """State with a version that counts its updates."""

    def __init__(self) -> None:
        self.version = 0
        self.error = ""  # display text; "" = no error
        self.cancelled = threading.Event()
        self._news = threading.Condition()
        self._watchers: list[Callable[[], None]] = []

    @property
    @abstractmethod
    def finished(self) -> bool:
        """Whether no further update will come."""

    def update(self, **fields: Any) -> None:
        """Set some fields and wake all waiting threads."""
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
        """Register `wake` to be called at every update, on the updating thread; it must not block."""
        with self._news:
            self._watchers.append(wake)

    def unwatch(self, wake: Callable[[], None]) -> None:
        """End `watch`."""
        with self._news:
            self._watchers.remove(wake)

    def wait(self, version: int, timeout: float | None = None) -> int:
        """Block until the version differs from `version`, the work is finished, or `timeout` s passed; returns the
        version."""
        with self._news:
            self._news.wait_for(lambda: self.version != version or self.finished, timeout)
            return self.version

    def join(self, timeout: float | None = None) -> bool:
        """Block until finished, at most `timeout` seconds; returns whether it is."""
        with self._news:
            return self._news.wait_for(lambda: self.finished, timeout)


class Answer(Live):
    """An answer being written. `chat_id` is None for one of the HTTP API, which belongs to no chat.

    `undone`: it failed (or was stopped) before its first token and the chat is unchanged, so put the user's text back
    into the input box and show `error`."""

    def __init__(self, chat_id: int | None, message_id: int | None) -> None:
        super().__init__()
        self.chat_id, self.message_id = chat_id, message_id
        self.state: Literal["queued", "prefill", "streaming", "done", "error"] = "queued"
        self.text = ""
        self.prefill_done = 0  # prompt positions computed so far
        self.prefill_total = 0  # prompt positions in all
        self.prefill_cached = 0  # prompt positions taken over from an earlier answer
        self.n_tokens = 0
        self.opens_reasoning = False  # its text starts in the middle of the model's reasoning
        self.logprobs: tuple[TokenLogprob, ...] = ()  # of its tokens, where requested
        self.stats: AnswerStats | None = None
        self.undone = False
        self.refused = False  # it failed because of the request, not because of the server ...
        self.too_long = False  # ... which had more tokens than the context holds
        self.interrupted = False  # it was stopped because the program ends
        self.unrecorded = 0  # passes whose record the store could not save
        self.unsaved = ""  # why part of it is not in the store, as display text; saving is retried
        self.requested_s = time.perf_counter()
        self.ttft_ms = 0.0  # from the start of writing to the first token; 0 = none yet
        self.queued_ms = 0.0  # waited behind other answers before its prefill began

    @property
    def finished(self) -> bool:
        return self.state in ("done", "error")
