"""The answers that wait to be written: one at a time, in request order."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass

from app.services.answer_times import Turns
from app.services.engine_protocol import Asked
from app.services.loading import Loaded
from app.services.progress import Answer
from core.settings.sampling import Sampling


@dataclass(frozen=True, slots=True)
class Request:
    """One answer to write, with its inputs."""

    answer: Answer
    prompt: Asked
    sampling: Sampling
    model: Loaded


class AnswerQueue:
    """Filled by any thread, emptied by the one that writes answers."""

    def __init__(self) -> None:
        self._waiting: deque[Request] = deque()
        self._now: Request | None = None
        self._turns = Turns()
        self._news = threading.Condition()
        self._closed = False

    @property
    def busy(self) -> bool:
        """Whether an answer is being written or waits."""
        with self._news:
            return self._now is not None or bool(self._waiting)

    @property
    def waiting(self) -> int:
        """Number of queued answers."""
        with self._news:
            return len(self._waiting)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def require_place(self) -> None:
        """Raises QueueFullError when the queue is full."""
        with self._news:
            self._turns.require_place(len(self._waiting))

    def put(self, request: Request) -> None:
        """Queue an answer; it starts when the earlier ones have ended."""
        with self._news:
            self._waiting.append(request)
            self._news.notify_all()

    def withdraw(self, answer: Answer) -> list[Request]:
        """Remove and return the request of an answer that waits."""
        with self._news:
            found = [request for request in self._waiting if request.answer is answer]
            for request in found:
                self._waiting.remove(request)
        return found

    def next(self, timeout: float | None) -> Request | None:
        """Wait for the next request and begin it; None when `timeout` seconds passed without one, or at the close."""
        with self._news:
            self._news.wait_for(lambda: self._waiting or self._closed, timeout)
            if not self._waiting:
                return None
            self._now = self._waiting.popleft()
            self._turns.begin()
            return self._now

    def end(self) -> None:
        """The request begun last has ended: the model is free."""
        with self._news:
            self._turns.end()
            self._now = None

    def close(self) -> list[Request]:
        """Let `next` return when the queue is empty; returns the requests that wait or are being written."""
        with self._news:
            self._closed = True
            self._news.notify_all()
            return [*self._waiting, *([self._now] if self._now else [])]
