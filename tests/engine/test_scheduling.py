"""Batches that a scheduler divides: answers are those of each alone, and it is told what each sequence needs."""

import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from core.engine import Engine
from core.engine.batch_request import BatchRequest
from core.policy.batching import NoScheduler, RandomScheduler, Scheduler, TokenScheduler
from core.policy.batching.scheduler import Groups
from core.policy.batching.unions import Paths
from core.policy.predict import Prediction
from core.policy.predict.path_reader import PathReader
from core.policy.predict.worker import InlineWorker
from core.runtime.prediction.view import EngineView
from tests.engine.batches import GREEDY, TEXTS, Answers, alone, together
from tests.engine.profiles import drawn_profile
from tests.selection import layered


@pytest.fixture
def engine(of_four: Engine) -> Engine:
    return of_four


SCHEDULERS = layered(
    [NoScheduler(), RandomScheduler(2), TokenScheduler()], quick=lambda one: isinstance(one, TokenScheduler)
)


@pytest.mark.long(0.1)
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_two_units_are_divided_in_turn_beside_the_computation(engine: Engine, scheduler: Scheduler) -> None:
    """Four batches are at work; answers are those of each alone, and only the first division is waited for."""
    threads: list[str] = []
    regroup = scheduler.regroup

    class Where:
        def regroup(self, paths: Paths, size: int) -> Groups:
            threads.append(threading.current_thread().name)
            return regroup(paths, size)

    texts = [f"{text} {n}" for n in range(2) for text in TEXTS]
    wanted = {n: alone(engine, text, GREEDY) for n, text in enumerate(texts)}
    found, requests = Answers(), [BatchRequest(n, text, GREEDY) for n, text in enumerate(texts)]
    for one in engine.generate_many(requests, 2, scheduler=Where(), pipelined=True):
        found.take(one)
    assert found.tokens == wanted
    sizes = [len(step.rows) for step in found.steps.values() if step.phase == "decode"]
    assert max(sizes) <= 2 and sizes.count(2) >= 8
    beside = [name for name in threads if name.startswith("moestro-schedule")]
    assert len(beside) >= 8 and len(threads) - len(beside) <= 2, threads
    assert not [one for one in threading.enumerate() if one.name.startswith("moestro-schedule")], "its thread has ended"


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_scheduled_answers_are_those_of_each_alone(engine: Engine, scheduler: Scheduler) -> None:
    wanted = {n: alone(engine, text, GREEDY) for n, text in enumerate(TEXTS)}
    found = together(engine, [BatchRequest(n, text, GREEDY) for n, text in enumerate(TEXTS)], 3, scheduler)
    assert found.tokens == wanted
    sizes = [len(step.rows) for step in found.steps.values() if step.phase == "decode"]
    assert max(sizes) <= 3 and sizes.count(3) >= 8, "two batches of three"
    assert len(engine.batching.regrouped) >= 8


class Told(NoScheduler):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.seen: list[Paths] = []

    def regroup(self, paths: Paths, size: int) -> Groups:
        self.seen.append(paths)
        return super().regroup(paths, size)


@pytest.mark.long(0.1)
def test_the_path_network_follows_every_sequence_of_a_batch(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler is told what it says of each one's next token, and the pass prefetches what any of them needs."""
    engine.use_profile(drawn_profile(engine))
    wanted = {n: alone(engine, text, GREEDY) for n, text in enumerate(TEXTS[:4])}
    engine.change({"predictor": "routing_path", "eviction": "plec", "scope": "global", "prefetch_guard": False})
    host, shape = engine.predictor_host, engine.shape
    predictor: Any = host.predictor
    predictor.close()
    predictor.worker = InlineWorker(PathReader(predictor.task(EngineView(host, -1, (), None, None))))
    first: list[set[tuple[int, int]]] = []
    predict_first = host.predict_first

    def named() -> Sequence[Prediction]:
        predictions = predict_first()
        first.append({(one.layer, one.expert) for one in predictions})
        return predictions

    monkeypatch.setattr(host, "predict_first", named)
    scheduler = Told()
    pieces = together(engine, [BatchRequest(n, text, GREEDY) for n, text in enumerate(TEXTS[:4])], 2, scheduler)
    assert pieces.tokens == wanted
    followed: dict[int, PathReader] = {}
    steps = list(pieces.steps.values())
    assert len(first) == len(steps)
    prompts = [engine.prompt.encode(text, engine.context) for text in TEXTS[:4]]
    expected: dict[int, np.ndarray] = {}
    turns = iter(scheduler.seen)
    decodes, done = 0, Counter[int]()
    for step, said in zip(steps, first, strict=True):
        if step.phase == "decode" and decodes % 2 == 0:
            told = next(turns).reshape(-1, shape.layers, shape.experts)
        decodes += step.phase == "decode"
        need = np.zeros((shape.layers, shape.experts), bool)
        for request, count in step.rows:
            one = request - steps[0].rows[0][0]
            if step.phase == "prefill":
                followed[one] = PathReader(predictor.task(EngineView(host, -1, (), None, None)))
                tokens = prompts[one]
            else:
                tokens = [wanted[one][done[one]]]
                done[one] += 1
            chances = followed[one].follow(tokens)
            most = min(shape.top_k * count, shape.experts)
            own = np.zeros_like(need)
            np.put_along_axis(own, np.argsort(-chances, 1, "stable")[:, :most], True, 1)
            need |= own
            if step.phase == "decode":
                expected[one] = own
                assert np.array_equal(told[one], own), "what the scheduler was told of it"
        assert said == set(zip(*map(list, np.nonzero(need)), strict=True)), "what the pass is said to need"
    assert decodes >= 8


@pytest.mark.long(0.1)
def test_the_token_scheduler_regroups_by_what_sequences_needed_last(engine: Engine) -> None:
    """It is told each sequence's experts of the newest token, as recorded."""
    scheduler = Told()
    found = together(engine, [BatchRequest(n, text, GREEDY) for n, text in enumerate(TEXTS[:4])], 2, scheduler)
    shape, newest = engine.shape, dict[int, np.ndarray]()
    decoded = [step for step in found.steps.values() if step.phase == "decode"]
    for first, second, told in zip(decoded[0::2], decoded[1::2], scheduler.seen[1:], strict=False):
        for step in (first, second):
            for row, (request, _) in enumerate(step.rows):
                newest[request] = step.ids[:, row]
        for at, request in enumerate(sorted(newest)):
            experts = told.reshape(-1, shape.layers, shape.experts)[at]
            assert [sorted(np.flatnonzero(one)) for one in experts] == [
                sorted({*one}) for one in newest[request].tolist()
            ]
