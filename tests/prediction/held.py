"""A predictor's worker whose answers a test holds back, as a slow process would, and lets go by an event."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from core.policy.predict.worker import WorkerTask
from core.policy.predict.workers import make_worker
from core.runtime.prediction import predictor_host
from core.runtime.prediction.predictor_host import PredictorHost


class HeldWorker:
    """A core.policy.predict.worker.AsyncWorker that works at once; what it found is there when `let_go` is set, or when
    it is waited for."""

    ready, behind = True, 0

    def __init__(self, task: WorkerTask, let_go: threading.Event) -> None:
        self._worker, self._let_go = make_worker(task), let_go
        self._answers: list[bytes] = []

    def give(self, message: bytes) -> None:
        if answer := self._worker.work(message):
            self._answers.append(answer)

    def take(self) -> list[bytes]:
        return self.wait() if self._let_go.is_set() else []

    def wait(self) -> list[bytes]:
        answers, self._answers = self._answers, []
        return answers

    def close(self) -> None:
        self._answers.clear()


@contextmanager
def held_until(layer: int) -> Iterator[None]:
    """Every predictor chosen meanwhile gets the answers of a pass when `layer` is reached, and none before."""
    let_go = threading.Event()
    first, predict = PredictorHost.predict_first, PredictorHost.predict

    def begun(self: PredictorHost) -> Any:
        let_go.clear()
        return first(self)

    def reached(self: PredictorHost, at: int, *args: Any) -> Any:
        if at >= layer:
            let_go.set()
        return predict(self, at, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(predictor_host, "ProcessWorker", lambda task, on_answer: HeldWorker(task, let_go))
        patch.setattr(PredictorHost, "predict_first", begun)
        patch.setattr(PredictorHost, "predict", reached)
        yield
