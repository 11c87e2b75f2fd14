"""What a predictor has worked out beside the pass, so that no layer waits for it: a worker, its messages, its answers.

A message and an answer are bytes that the predictor and its worker agree on, for the worker may live in a process of
its own (core.prediction.worker.process_worker). A replay has it here and at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import numpy.typing as npt


class Task(NamedTuple):
    """What a worker is made of, in numbers alone. `name`: which one, of core.policy.predict.workers."""

    name: str
    told: Mapping[str, int]
    arrays: Mapping[str, npt.NDArray[Any]]


class Worker(Protocol):
    """Answers one message after the other, in the order given."""

    def work(self, message: bytes) -> bytes:
        """b"": nothing came of it."""


class AsyncWorker(Protocol):
    """A worker somewhere. Used by one thread."""

    @property
    def ready(self) -> bool:
        """It has started. What was given before waits until then."""

    @property
    def behind(self) -> int:
        """Messages given and not worked on yet."""

    def give(self, message: bytes) -> None:
        """Have it worked on some time. Never waits."""

    def take(self) -> list[bytes]:
        """Answers since the last call, in order, without the empty ones. Never waits."""

    def wait(self) -> list[bytes]:
        """The same, once everything given was worked on."""

    def close(self) -> None:
        """End it; nothing more comes of it. May be called twice."""


class InlineWorker:
    """`AsyncWorker` that works when it is given something."""

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
