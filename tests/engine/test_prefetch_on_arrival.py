"""The answer of an asynchronous search prefetches when it arrives (FineMoE section 4.3), on another thread than the one
that computes: for the next layer, too, and for layer 0 of a token that has been drawn."""

import functools
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from core.engine import Engine
from core.policy.predict import Prediction
from core.runtime.prediction.worker.process_worker import ProcessWorker
from core.settings.config import Settings
from core.settings.loading import LoadSpec
from core.settings.sampling import Sampling
from tests.engine.profiles import drawn_profile
from tests.selection import layered

WAIT_S = 20.0
TOKENS = 5


@dataclass
class Issued:
    """The prefetches of a pass, as they are issued: (layer in which, layer for which)."""

    pairs: list[tuple[int, int]] = field(default_factory=list)
    threads: set[str] = field(default_factory=set)
    news: threading.Condition = field(default_factory=threading.Condition)
    missing: list[int] = field(default_factory=list)  # layers whose prefetch was waited for in vain

    def wait(self, layer: int) -> None:
        """Until the prefetch for `layer` is issued; a failure is enough to wait for no other."""
        with self.news:
            if not self.news.wait_for(lambda: any(to == layer for _, to in self.pairs), 0 if self.missing else WAIT_S):
                self.missing.append(layer)


@pytest.fixture
def engine(model: Path) -> Iterator[Engine]:
    engine = Engine.load(LoadSpec.checked(str(model), Settings({"budget": "50%"}), dtype="float32", context=256))
    engine.use_profile(drawn_profile(engine))
    yield engine
    engine.unload()


def searching(engine: Engine, distance: int) -> ProcessWorker:
    engine.change({"predictor": "expert_map", "predictor.distance": distance, "prefetch_guard": False})
    list(engine.generate("Hi", Sampling(max_new_tokens=1)))
    worker = engine.predictor_host.predictor.worker
    assert isinstance(worker, ProcessWorker)
    worker.wait()
    return worker


def settled(worker: ProcessWorker) -> None:
    end_s = time.monotonic() + WAIT_S
    while worker.behind and time.monotonic() < end_s:
        time.sleep(0.0005)
    assert not worker.behind


def taken_by_others(worker: ProcessWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    """This thread finds no answer there, as if all came a moment later."""
    take, own = worker.take, threading.current_thread()
    monkeypatch.setattr(worker, "take", lambda: [] if threading.current_thread() is own else take())


def answer(engine: Engine, tokens: int = TOKENS) -> tuple[list[int | None], list[Any]]:
    pieces = list(engine.generate("Why do caches work?", Sampling(max_new_tokens=tokens)))
    return [piece.token for piece in pieces if piece.kind == "token"], [piece.step for piece in pieces if piece.step]


@pytest.mark.parametrize("distance", layered([1, 2], quick=lambda distance: distance == 2))
def test_a_layer_is_prefetched_before_reached(engine: Engine, distance: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before each attention the search for its layer is given all the time that it needs, and the link is free: what is
    missing then would always be missing."""
    engine.change({"predictor": "none"})
    exact, _ = answer(engine)
    worker, issued, layers = searching(engine, distance), Issued(), engine.shape.layers
    prefetch, begin = engine.expert_cache.prefetch, engine.expert_cache.begin_pass
    done: list[Issued] = []

    def spied(predictions: Sequence[Prediction], at: int, *rest: Any) -> None:
        prefetch(predictions, at, *rest)
        with issued.news:
            issued.pairs += [(at, layer) for layer in {one.layer for one in predictions}]
            issued.threads.add(threading.current_thread().name)
            issued.news.notify_all()

    def begun(phase: str, tokens: int) -> None:
        nonlocal issued
        settled(worker)  # the search for a token that is drawn has begun
        done.append(issued)
        issued = Issued(missing=issued.missing)
        begin(phase, tokens)

    monkeypatch.setattr(engine.expert_cache, "prefetch", spied)
    monkeypatch.setattr(engine.expert_cache, "begin_pass", begun)
    with ExitStack() as hooks:
        for number, layer in enumerate(engine.model.model.layers):
            reached = functools.partial(lambda number, *_: issued.wait(number), number)
            hooks.enter_context(layer.self_attn.register_forward_pre_hook(reached))
        tokens, _ = answer(engine)
    done.append(issued)
    assert not issued.missing, "a layer was reached before its prefetch was issued"
    assert tokens == exact, "a prefetch changes no answer"
    assert len(done) == TOKENS + 1  # the prompt, and each token but the last, after what was before
    for one in done[2:]:
        assert {to for _, to in one.pairs} == set(range(layers))
        assert all(max(-1, to - distance) <= at < to for at, to in one.pairs)
    assert set.union(*(one.threads for one in done)) > {threading.current_thread().name}
    engine.expert_cache.check_integrity()


def test_the_search_for_a_token_begins_when_it_is_drawn(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    worker, recorder, events = searching(engine, 2), engine.parts.recorder, list[str]()
    end, begin, give = recorder.end, recorder.begin, worker.give

    def noted(what: str, then: Any) -> Any:
        return lambda *args: (events.append(what), then(*args))[1]

    monkeypatch.setattr(recorder, "end", noted("recorded", end))
    monkeypatch.setattr(recorder, "begin", noted("begun", begin))
    monkeypatch.setattr(worker, "give", noted("asked", give))
    answer(engine, 3)
    layers = ["asked"] * engine.shape.layers  # each layer's distribution
    assert events == ["asked", *["begun", *layers, "asked", "recorded"] * 2, "begun", *layers, "recorded"]


@pytest.mark.long(0.1)
def test_an_error_of_a_prefetch_on_another_thread_ends_a_pass(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    taken_by_others(searching(engine, 1), monkeypatch)
    prefetch, own, failed = engine.expert_cache.prefetch, threading.current_thread(), threading.Event()

    def failing(*args: Any) -> None:
        if threading.current_thread() is not own:
            failed.set()
            raise ZeroDivisionError("no slot can be found")
        prefetch(*args)

    monkeypatch.setattr(engine.expert_cache, "prefetch", failing)

    def wait(*_: Any) -> None:
        failed.wait(WAIT_S)

    attention, wanted = engine.model.model.layers[1].self_attn, "no slot can be found"
    with attention.register_forward_pre_hook(wait), pytest.raises(ZeroDivisionError, match=wanted):
        answer(engine)
    monkeypatch.undo()
    assert len(answer(engine)[0]) == TOKENS
    engine.expert_cache.check_integrity()


def test_answers_wait_while_the_computing_thread_has_the_cache(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = searching(engine, 2)
    taken_by_others(worker, monkeypatch)
    prefetcher, cache = engine.wiring.answering.step.prefetcher, engine.expert_cache
    monkeypatch.setattr(worker, "_on_answer", lambda: None)  # nobody hears of answers but whom this test tells
    acquire, prefetch, others, phases = cache.acquire, cache.prefetch, list[Sequence[Prediction]](), list[bool]()
    own = threading.current_thread()

    def heard() -> list[Sequence[Prediction]]:
        """What another thread prefetches when it hears that all answers are there."""
        settled(worker)
        others.clear()
        thread = threading.Thread(target=prefetcher._on_answer)
        thread.start()
        thread.join(WAIT_S)
        assert not thread.is_alive()
        return [*others]

    def spied(predictions: Sequence[Prediction], *rest: Any) -> None:
        if threading.current_thread() is not own:
            others.append(predictions)
        prefetch(predictions, *rest)

    def acquired(layer: int, wanted: Sequence[int]) -> Any:
        assert heard() == []
        return acquire(layer, wanted)

    monkeypatch.setattr(cache, "acquire", acquired)
    monkeypatch.setattr(cache, "prefetch", spied)
    attention = engine.model.model.layers[1].self_attn
    with attention.register_forward_pre_hook(lambda *_: phases.append(heard() != [])):
        answer(engine)
    assert phases == [True] * TOKENS
    assert heard() == []  # no pass runs
    cache.check_integrity()
