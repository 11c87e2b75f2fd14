"""Work that a predictor gives to an asynchronous worker, so that no layer waits for it: worker, messages and answers.

Messages and answers are bytes in a format shared by the predictor and its worker, since the worker may run in its own
process (core.runtime.prediction.worker.process_worker). A replay runs it inline and synchronously."""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import numpy.typing as npt


class WorkerTask(NamedTuple):
    """The data that a worker is built from, numbers only. `name`: its kind, one of core.policy.predict.workers."""

    name: str
    sizes: Mapping[str, int]
    arrays: Mapping[str, npt.NDArray[Any]]


class Worker(Protocol):
    """Processes messages one by one, in the order given."""

    def work(self, message: bytes) -> bytes:
        """The answer; b"" = no result."""


class AsyncWorker(Protocol):
    """A worker that may run elsewhere. Used by one thread."""

    @property
    def ready(self) -> bool:
        """Whether it has started. Messages given before wait until then."""

    @property
    def behind(self) -> int:
        """Number of messages given and not processed yet."""

    def give(self, message: bytes) -> None:
        """Queue a message. Never waits."""

    def take(self) -> list[bytes]:
        """Answers since the last call, in order, without empty ones. Never waits."""

    def wait(self) -> list[bytes]:
        """The same, after all given messages were processed."""

    def close(self) -> None:
        """Stop it; no more answers come. May be called twice."""


class InlineWorker:
    """An `AsyncWorker` that processes each message at once, in `give`."""

    ready, behind = True, 0

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._answers: list[bytes] = []

    def give(self, message: bytes) -> None:
        if answer := self._worker.work(message):
            self._answers.append(answer)

    def take(self) -> list[bytes]:
        answers, self._answers = self._answers, []
        return answers

    def wait(self) -> list[bytes]:
        return self.take()

    def close(self) -> None:
        self._answers.clear()
