"""The answers that wait to be written, in request order, and how long a queued one is expected to wait."""

import math
import threading
import time
from collections import deque
from dataclasses import dataclass

from app.services.loading import AnyPrompt, Loaded
from app.services.progress import Answer
from core.errors import BusyError
from core.settings.sampling import Sampling

MOST_WAITING = 200  # queued answers, of the dashboard and the API together
REMEMBERED = 20  # ended answers that the expected wait is based on
UNKNOWN_S = 30  # when to retry while no answer has ended yet


@dataclass(frozen=True, slots=True)
class Request:
    """One answer to write, with its inputs."""

    answer: Answer
    prompt: AnyPrompt
    sampling: Sampling
    model: Loaded


class QueueFullError(BusyError):
    """The queue of answers is full. `retry_s`: seconds until a place is expected to be free."""

    def __init__(self, message: str, retry_s: int) -> None:
        super().__init__(message)
        self.retry_s = retry_s


class Turns:
    """Durations of answers from the start of writing to their end. Not thread-safe: guarded by the owner's lock."""

    def __init__(self) -> None:
        self._took_s: deque[float] = deque(maxlen=REMEMBERED)
        self._began_s: dict[int, float] = {}  # of the answers that are being written, oldest first

    def begin(self, key: int = 0) -> None:
        """Writing of the answer `key` starts."""
        self._began_s[key] = time.monotonic()

    def end(self, key: int = 0) -> None:
        """The answer has ended, in whatever state."""
        if (began_s := self._began_s.pop(key, None)) is not None:
            self._took_s.append(time.monotonic() - began_s)

    def require_place(self, waiting: int) -> None:
        """Raises QueueFullError, with the expected wait, when the queue is full."""
        if waiting < MOST_WAITING:
            return
        full = f"{waiting} answers are waiting already, and no more fit in the queue."
        if not self._took_s:
            raise QueueFullError(
                f"{full} How long they take is not known yet: none has finished so far. Ask again later.", UNKNOWN_S
            )
        mean_s = sum(self._took_s) / len(self._took_s)
        spent_s = time.monotonic() - min(self._began_s.values()) if self._began_s else 0.0
        left_s = max(0.0, mean_s - spent_s)
        raise QueueFullError(
            f"{full} Going by the last {len(self._took_s)} answers, a place is free in about {span(left_s)}, and its "
            f"answer begins about {span(mean_s * waiting)} after that. Ask again then.",
            max(1, math.ceil(left_s)),
        )


def span(seconds: float) -> str:
    """A waiting time as text."""
    whole = max(1, math.ceil(seconds))
    if whole < 120:
        return f"{whole} s"
    minutes = round(whole / 60)
    return f"{minutes} min" if minutes < 120 else f"{round(minutes / 60)} h"


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
