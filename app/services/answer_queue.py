"""The answers that wait to be written, in request order: one at a time, or as many as the model was loaded for."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass

from app.services.answer_times import Turns
from app.services.engine_protocol import AnyPrompt
from app.services.loading import Loaded
from app.services.progress import Answer
from core.settings.sampling import Sampling


@dataclass(frozen=True, slots=True)
class Request:
    """One answer to write, with its inputs."""

    answer: Answer
    prompt: AnyPrompt
    sampling: Sampling
    model: Loaded


class AnswerQueue:
    """Filled by any thread, emptied by the one that writes answers."""

    def __init__(self) -> None:
        self._waiting: deque[Request] = deque()
        self._now: list[Request] = []  # being written
        self._turns = Turns()
        self._news = threading.Condition()
        self._closed = False

    @property
    def busy(self) -> bool:
        """Whether an answer is being written or waits."""
        with self._news:
            return bool(self._now or self._waiting)

    @property
    def waiting(self) -> int:
        """Number of queued answers."""
        with self._news:
            return len(self._waiting)

    def before(self, answer: Answer) -> int:
        """Number of queued answers that are written before this one."""
        with self._news:
            return next((at for at, request in enumerate(self._waiting) if request.answer is answer), 0)

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
            return self._begun()

    def at_once(self) -> Request | None:
        """Begin the next request; None when none waits."""
        with self._news:
            return self._begun()

    def _begun(self) -> Request | None:
        if not self._waiting:
            return None
        request = self._waiting.popleft()
        self._now.append(request)
        self._turns.begin(id(request))
        return request

    def end(self, request: Request) -> None:
        """A request that was begun has ended. After the last one the model is free."""
        with self._news:
            self._turns.end(id(request))
            self._now = [one for one in self._now if one is not request]

    def close(self) -> list[Request]:
        """Let `next` return when the queue is empty; returns the requests that wait or are being written."""
        with self._news:
            self._closed = True
            self._news.notify_all()
            return [*self._waiting, *self._now]
