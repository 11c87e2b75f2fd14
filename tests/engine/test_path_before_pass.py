"""ExpertFlow's predictor answers before a pass begins: asked as soon as the tokens are known, told to the cache for all
layers before layer 0 requests anything, and waited for at most as long as that saves."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from core.cache.lease import Lease
from core.engine import Engine
from core.policy.predict.path_messages import answer, question
from core.policy.predict.path_reader import needed
from core.policy.prefetch.wait_bound import WaitBound
from core.runtime.batch import Batch, Share
from core.runtime.prediction.answer_wait import AnswerWait
from core.settings.config import Settings
from core.settings.loading import LoadSpec
from core.settings.sampling import Sampling
from core.types import StepRecord
from tests.engine.profiles import drawn_profile
from tests.engine.test_predictors import captured_predictions, passes

TICK_S = 0.001


class Clock:
    """Time that goes on by a tick whenever a pass waits for a moment."""

    def __init__(self) -> None:
        self.now_s = self.waited_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def pause(self) -> None:
        self.now_s += TICK_S
        self.waited_s += TICK_S


class Worker:
    """Answers each question with the same distribution, `takes_s` after it was asked; None = never."""

    ready, behind = True, 0

    def __init__(self, shape: Any, clock: Clock, takes_s: float | None) -> None:
        self.said: npt.NDArray[np.float32] = np.random.default_rng(7).random((shape.layers, shape.experts), np.float32)
        self.asked: list[list[int]] = []  # the tokens
        self.fresh: list[bool] = []
        self._clock, self._takes_s, self._top_k = clock, takes_s, shape.top_k
        self._due: list[tuple[float, bytes]] = []

    def give(self, message: bytes) -> None:
        number, (share,) = question(message)
        self.asked.append(list(share.tokens))
        self.fresh.append(share.fresh)
        if self._takes_s is not None:
            idle = np.log1p(-self.said)
            told = answer(number, [share.request], idle.reshape(1, -1), needed(idle, self._top_k).reshape(1, -1))
            self._due.append((self._clock() + self._takes_s, told))

    def take(self) -> list[bytes]:
        there = [answer for due_s, answer in self._due if due_s <= self._clock()]
        self._due = [one for one in self._due if one[0] > self._clock()]
        return there

    def wait(self) -> list[bytes]:
        raise AssertionError("nothing waits without a bound")

    def close(self) -> None:
        return


@pytest.fixture
def engine(model: Path) -> Iterator[Engine]:
    settings = Settings({"budget": "50%", "scope": "global"})
    engine = Engine.load(LoadSpec.checked(str(model), settings, dtype="float32", context=256))
    engine.use_profile(drawn_profile(engine))
    engine.change({"eviction": "plec", "predictor": "routing_path", "predictor.distance": 1})
    engine.change({"prefetch_guard": False})  # whom a prefetch may displace is asked elsewhere
    yield engine
    engine.unload()


def scripted(engine: Engine, takes_s: float | None) -> tuple[Worker, Clock]:
    """Its predictor's worker and clock are replaced."""
    host, clock = engine.predictor_host, Clock()
    host.predictor.close()
    worker = Worker(engine.shape, clock, takes_s)
    host.predictor.worker = worker
    host.predictor.wait = host.answer_wait = AnswerWait(clock, clock.pause)
    return worker, clock


def worth(engine: Engine, saves_s: float, search_s: float) -> None:
    """As if decoded tokens had been measured: what a prediction saves, and how long one takes to find."""
    bound = engine.predictor_host.answer_wait.bound = WaitBound()
    bound.searched(1, search_s)
    bound.passed(1, saves_s, 0.0, in_time=False)


def told_at_layer_0(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[npt.NDArray[np.bool_]]:
    """[L, E] which experts the eviction policy knows as predicted, whenever layer 0 makes its requests."""
    told: list[npt.NDArray[np.bool_]] = []
    acquire, shape = engine.expert_cache.acquire, engine.shape

    def spied(layer: int, wanted: Any) -> Lease:
        if layer == 0:
            told.append(engine.expert_cache.hints.predicted.reshape(shape.layers, shape.experts).copy())
        return acquire(layer, wanted)

    monkeypatch.setattr(engine.expert_cache, "acquire", spied)
    return told


def likeliest(worker: Worker, most: int) -> npt.NDArray[np.bool_]:
    """[L, E] the `most` likeliest experts of each layer."""
    return worker.said >= np.sort(worker.said, 1)[:, -most:][:, :1]


def test_an_answer_in_time_is_told_of_all_layers_at_first(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    worker, clock = scripted(engine, takes_s=3 * TICK_S)
    worth(engine, saves_s=10 * TICK_S, search_s=3 * TICK_S)
    told = told_at_layer_0(engine, monkeypatch)
    for _ in engine.generate([{"role": "user", "content": "Hi"}], Sampling(max_new_tokens=4)):
        pass
    assert len(told) == len(worker.asked) == 4  # the prompt, and a pass for each token but the last
    assert all(np.array_equal(one, likeliest(worker, engine.shape.top_k)) for one in told[1:])
    assert clock.waited_s == pytest.approx(3 * 3 * TICK_S)  # decoding, and no longer than until it was there
    engine.expert_cache.check_integrity()


@pytest.mark.long(0.1)
def test_as_many_are_fetched_before_a_pass_as_there_are_slots(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(engine, takes_s=0.0)
    shape, cache = engine.shape, engine.expert_cache
    resident: list[int] = []
    prefetch = cache.prefetch

    def spied(predictions: Any, at: int, *rest: Any) -> None:
        prefetch(predictions, at, *rest)
        if at == -1:  # not later: what is still queued when its layer is reached, and not wanted there, is cancelled
            predicted = np.flatnonzero(cache.hints.predicted)
            resident.append(sum(cache.is_resident(eid) for eid in predicted.tolist()))

    def land() -> None:
        for ticket in cache.copies.tickets.values():  # what is being copied keeps its slot
            cache.copies.link.wait(ticket)

    monkeypatch.setattr(cache, "prefetch", spied)
    passes(engine, land)
    assert resident[1:] == [min(cache.slots, shape.layers * shape.top_k)] * (len(resident) - 1)


@pytest.mark.long(0.1)
def test_slots_fill_in_the_order_of_use_not_of_likelihood(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    worker, _ = scripted(engine, takes_s=0.0)
    shape, cache = engine.shape, engine.expert_cache
    submitted, submit, prefetch = list[int](), cache.copies.link.submit, cache.prefetch
    for layer in range(shape.layers):  # what is absent is needed, least likely in layer 0
        absent = [not cache.is_resident(layer * shape.experts + expert) for expert in range(shape.experts)]
        worker.said[layer] = np.where(absent, 0.9 if layer else 0.2, 0.01)

    def spied(predictions: Any, at: int, *rest: Any) -> None:
        monkeypatch.setattr(
            cache.copies.link, "submit", lambda one: (submitted.append(one.eid // shape.experts), submit(one))[1]
        )
        prefetch(predictions, at, *rest)
        monkeypatch.setattr(cache.copies.link, "submit", submit)

    monkeypatch.setattr(cache, "prefetch", spied)
    worth(engine, saves_s=5 * TICK_S, search_s=2 * TICK_S)
    engine.wiring.answering.step.prefetcher.begin(Batch("decode", (Share([5], request=1),)))
    assert submitted == sorted(submitted) and {0, 1, 2} <= {*submitted}


@pytest.mark.long(0.1)
def test_a_predictor_holds_no_pass_up_longer_than_it_saves(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.change({"predictor": "none"})
    logits, tokens = passes(engine)
    engine.change({"predictor": "routing_path"})
    worker, clock = scripted(engine, takes_s=None)
    worker.behind = 1
    predicted = captured_predictions(engine, monkeypatch)
    waits: list[float] = []

    def between() -> None:
        waits.append(clock.waited_s)
        clock.waited_s = 0.0
        worth(engine, saves_s=5 * TICK_S, search_s=2 * TICK_S)  # it was quick before, always

    again, same = passes(engine, between)
    assert torch.equal(again, logits) and same == tokens and not predicted
    assert waits == [0.0, *[pytest.approx(5 * TICK_S)] * (len(waits) - 1)]  # of prompts nothing is known here


def test_a_search_that_takes_longer_than_it_saves_is_not_waited_for(engine: Engine) -> None:
    _, clock = scripted(engine, takes_s=7 * TICK_S)
    worth(engine, saves_s=5 * TICK_S, search_s=7 * TICK_S)

    def between() -> None:
        clock.now_s += 6 * TICK_S

    passes(engine, between)
    assert clock.waited_s == 0.0


def test_before_anything_was_measured_nothing_is_waited_for(engine: Engine) -> None:
    _, clock = scripted(engine, takes_s=TICK_S)
    passes(engine)
    assert clock.waited_s == 0.0


@pytest.mark.long(0.1)
def test_what_a_pass_stalls_says_how_long_the_next_one_waits(engine: Engine) -> None:
    scripted(engine, takes_s=None)
    steps = [p.step for p in engine.generate("Hi", Sampling(max_new_tokens=5)) if p.kind == "token" and p.step]
    stalled_s = [step.stall_ms / 1e3 for step in steps if step.phase == "decode"]
    assert len(stalled_s) == 4
    assert engine.predictor_host.answer_wait.bound.saves_s(1) == pytest.approx(sum(stalled_s) / 4, abs=1e-5)
    engine.change({"budget": "60%"})
    list(engine.generate("Hi", Sampling(max_new_tokens=1)))
    assert engine.predictor_host.answer_wait.bound.saves_s(1) == 0.0  # other settings have stalls of their own


def test_the_search_begins_before_a_drawn_token_is_recorded(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    worker, _ = scripted(engine, takes_s=0.0)
    recorder, events = engine.parts.recorder, list[str]()
    end, begin, give = recorder.end, recorder.begin, worker.give

    def ended(*args: Any) -> StepRecord:
        events.append("recorded")
        return end(*args)

    def begun(batch: Batch) -> None:
        events.append("begun")
        begin(batch)

    def given(message: bytes) -> None:
        events.append("asked")
        give(message)

    monkeypatch.setattr(recorder, "end", ended)
    monkeypatch.setattr(recorder, "begin", begun)
    monkeypatch.setattr(worker, "give", given)
    prompt = engine.prompt.encode("Hi", engine.context)
    drawn = [p.token for p in engine.generate("Hi", Sampling(max_new_tokens=3)) if p.kind == "token"]
    assert events == ["asked", *["begun", "asked", "recorded"] * 2, "begun", "recorded"]
    assert worker.asked == [prompt, [drawn[0]], [drawn[1]]]  # no pass computes the last one
    assert worker.fresh == [True, False, False]


@pytest.mark.long(0.1)
def test_the_next_part_of_a_prompt_is_searched_for_early(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    worker, _ = scripted(engine, takes_s=0.0)
    monkeypatch.setattr(engine._generation._passes, "chunk", 4)
    at_layer_0: list[int] = []
    arrive = engine.expert_cache.acquire

    def spied(layer: int, wanted: Any) -> Lease:
        at_layer_0.append(len(worker.asked)) if layer == 0 else None
        return arrive(layer, wanted)

    monkeypatch.setattr(engine.expert_cache, "acquire", spied)
    prompt = list(range(3, 13))
    monkeypatch.setattr(engine.prompt, "encode", lambda *_: prompt)
    list(engine.generate("Hi", Sampling(max_new_tokens=1)))
    assert worker.asked == [prompt[:4], prompt[4:8], prompt[8:]]
    assert sorted(set(at_layer_0)) == [2, 3]  # the second part is asked before the first one's layer 0, and so on
