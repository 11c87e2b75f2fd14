"""Every predictor in a running engine: it fetches ahead, changes no logit, and costs a router call only if it asks."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
import torch
from transformers import DynamicCache

from core.engine import Engine
from core.hf.cached_pass import cached_pass
from core.policy.predict import Prediction, Predictor, View
from core.runtime.batch import Batch, Share
from core.runtime.prediction import predictor_host
from core.runtime.prediction.worker.process_worker import ProcessWorker
from core.settings.config import Settings
from core.settings.loading import LoadSpec
from core.settings.registry import variants
from core.settings.sampling import Sampling
from tests.checkpoints import make_checkpoint
from tests.engine.profiles import drawn_profile
from tests.equality.passes import PROMPT, plain_transformers, run
from tests.logged import Logged
from tests.selection import layered
from tests.tiny_tokenizer import save_tokenizer

STEPS = 4
TINY = ("qwen3_moe", "deepseek_v3", "flex_olmo")
NAMES = [v.name for v in variants("predictor")]
ROUTERS = ["gate", "stride", "default_vectors", "hybrid"]  # that ask a router of a later layer
QUICK = [(TINY[0], "gate"), (TINY[1], "default_vectors")]
BESIDE = ["expert_map", "routing_path"]  # that have work done in a process


class Case(NamedTuple):
    engine: Engine
    logits: torch.Tensor
    tokens: list[int]


def open_case(path: Path, spec: LoadSpec) -> Case:
    plain = plain_transformers(path, torch.float32)
    logits, tokens = run(plain, DynamicCache(config=plain.config), lambda step: None, STEPS)
    engine = Engine.load(spec)
    engine.use_profile(drawn_profile(engine))
    return Case(engine, logits, tokens)


@pytest.fixture(scope="module", params=TINY)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    """Of different kinds: plain, shared experts and routers with a bias, routers that no norm feeds."""
    path = save_tokenizer(make_checkpoint(request.param, tmp_path_factory.mktemp(request.param)))
    settings = Settings({"budget": "50%", "scope": "global"})
    case = open_case(path, LoadSpec.checked(str(path), settings, dtype="float32", context=256))
    yield case
    case.engine.unload()


@torch.inference_mode()
def passes(engine: Engine, between: Callable[[], None] = lambda: None) -> tuple[torch.Tensor, list[int]]:
    """`run` as the engine does it: predictors are told of every pass before it begins."""
    cache, ids, logits, tokens = engine.fresh_cache(), PROMPT, list[torch.Tensor](), list[int]()
    request = engine.predictor_host.request + 1
    for _ in range(STEPS + 1):
        engine.expert_cache.core.now += 1
        engine.wiring.answering.step.prefetcher.begin(Batch("decode", (Share(ids, request=request),)))
        out = cached_pass(engine.model, torch.tensor([ids]), cache).logits[0]
        logits.append(out.clone())
        ids = [int(out[-1].argmax())]
        tokens += ids
        between()
    return torch.cat(logits), tokens[:-1]


def captured_predictions(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[Prediction]:
    predicted: list[Prediction] = []

    def keep(predictions: Sequence[Prediction]) -> Sequence[Prediction]:
        predicted.extend(predictions)
        return predictions

    predict, first = engine.predictor_host.predict, engine.predictor_host.predict_first
    monkeypatch.setattr(engine.predictor_host, "predict", lambda *args: keep(predict(*args)))
    monkeypatch.setattr(engine.predictor_host, "predict_first", lambda: keep(first()))
    return predicted


def check(case: Case, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, asked = case.engine, list[int]()
    answer = predictor_host.answer
    engine.change({"predictor": "none"})
    predicted = captured_predictions(engine, monkeypatch)
    monkeypatch.setattr(predictor_host, "answer", lambda site, *rest: asked.append(site.index) or answer(site, *rest))
    before = [len(site.router._forward_hooks) for site in engine.loaded.sites]
    engine.change({"predictor": name})
    predictor = engine.predictor_host.predictor
    predictor.patient = True
    watched = [len(site.router._forward_hooks) for site in engine.loaded.sites]
    logits, tokens = passes(engine, engine.expert_cache.check_integrity)
    assert (logits - case.logits).abs().max().item() == 0.0
    assert tokens == case.tokens
    assert bool(predicted) == predictor.looks
    assert bool(asked) == (name in ROUTERS)
    assert watched == [count + predictor.asks for count in before]
    engine.change({"predictor": "none"})
    assert [len(site.router._forward_hooks) for site in engine.loaded.sites] == before


@pytest.mark.parametrize(
    ("tiny", "name"), layered(itertools.product(TINY, NAMES), quick=lambda case: case in QUICK), indirect=["tiny"]
)
def test_no_predictor_changes_a_logit(tiny: Case, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check(tiny, name, monkeypatch)


@pytest.mark.parametrize("name", layered(NAMES, quick=lambda name: name == "gate"))
def test_a_model_that_is_called_directly_is_predicted_too(exact: Engine, name: str) -> None:
    """Nobody says then that a pass begins, and of which tokens."""
    exact.change({"predictor": "none"})
    wanted, _ = run(exact.model, exact.fresh_cache(), lambda step: None, STEPS)
    exact.change({"predictor": name})
    logits, _ = run(exact.model, exact.fresh_cache(), lambda step: None, STEPS)
    assert torch.equal(logits, wanted)
    exact.expert_cache.check_integrity()
    exact.change({"predictor": "none"})


@pytest.mark.parametrize("name", layered(NAMES, quick=lambda name: name in ("none", "estimator", "gate")))
def test_a_layer_waits_for_the_device_once_at_most(exact: Engine, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a predictor asks for comes to the host in one piece."""
    exact.change({"predictor": name})
    waits: list[int] = []
    to_host = torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: waits.append(1) or to_host(tensor))
    passes(exact)
    assert len(waits) <= exact.shape.layers * (STEPS + 1)
    assert bool(waits) == (name in [*ROUTERS, "estimator"])
    exact.change({"predictor": "none"})


@pytest.mark.parametrize("scope", layered(["layer", "global"], quick=lambda scope: scope == "global"))
@pytest.mark.parametrize("name", [n for n in NAMES if n != "none"])
def test_each_names_experts_in_any_scope(exact: Engine, name: str, scope: str, monkeypatch: pytest.MonkeyPatch) -> None:
    exact.change({"predictor": name, "scope": scope, "budget": "50%"})
    exact.predictor_host.predictor.patient = True
    predicted = captured_predictions(exact, monkeypatch)
    passes(exact)
    assert predicted and all(0 <= g.score <= 1 for g in predicted)
    exact.expert_cache.check_integrity()
    exact.change({"scope": "global", "predictor": "none"})


class Listener(Predictor):
    starts = True

    def __init__(self) -> None:
        self.heard: list[tuple[int, int, int]] = []
        self.begun: list[list[int]] = []

    def begin(self, view: View) -> Sequence[Prediction]:
        self.begun.append([*view.tokens])
        return ()

    def predict(self, view: View) -> Sequence[Prediction]:
        assert [*view.tokens] == self.begun[-1]
        if view.layer == 0:
            self.heard.append((view.request, len(view.ids), view.experts))
        return ()


def test_every_prompt_begins_a_request_and_every_pass_is_announced(exact: Engine) -> None:
    exact.change({"predictor": "recent"})
    exact.predictor_host.predictor = listener = Listener()
    answers = [
        [p.token for p in exact.generate("Why do caches work?", Sampling(max_new_tokens=3)) if p.kind == "token"]
        for _ in range(2)
    ]
    first, second = sorted({request for request, _, _ in listener.heard})
    assert second == first + 1
    prompts = [i for i, (_, tokens, _) in enumerate(listener.heard) if tokens > 1]
    assert [listener.heard[i][0] for i in prompts] == [first, second]
    assert {experts for _, _, experts in listener.heard} == {exact.shape.experts}
    prompt = exact.prompt.encode("Why do caches work?", exact.context)
    assert listener.begun == [ids for answer in answers for ids in (prompt, *([t] for t in answer[:2]))]


@pytest.mark.long(0.1)
@pytest.mark.parametrize("name", BESIDE)
def test_what_works_beside_is_heard_and_ends_with_its_predictor(exact: Engine, name: str) -> None:
    exact.change({"predictor": name})
    predictor, worker = exact.predictor_host.predictor, exact.predictor_host.predictor.worker
    assert isinstance(worker, ProcessWorker)
    predictor.patient = True
    passes(exact)
    pid = worker.pid
    assert pid is not None and worker.ready and worker.behind == 0
    exact.change({"predictor": "none"})
    assert not psutil.pid_exists(pid)


@pytest.mark.parametrize("name", layered(BESIDE, quick=lambda name: name == "routing_path"))
def test_a_process_that_dies_is_said_once_and_computing_goes_on(exact: Engine, name: str, caplog: Logged) -> None:
    exact.change({"predictor": name})
    worker = exact.predictor_host.predictor.worker
    assert isinstance(worker, ProcessWorker)
    exact.predictor_host.predictor.patient = True
    passes(exact)
    assert worker.pid is not None
    dead = psutil.Process(worker.pid)
    dead.kill()
    dead.wait(60)
    for _ in range(2):
        assert passes(exact)
    exact.change({"predictor": "none"})
    assert [r.levelname for r in caplog.records if "worker process died" in r.getMessage()] == ["WARNING"]
