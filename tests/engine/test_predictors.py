"""Every predictor in a running engine: it fetches ahead, changes no logit, and costs a router call only if it asks."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
import torch
from transformers import DynamicCache

from core.engine import Engine
from core.errors import ProfileError, SettingError
from core.hf.cached_pass import cached_pass
from core.hf.files import model_path
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
NEEDY = [v.name for v in variants("predictor") if v.needs]
ROUTERS = ["gate", "stride", "default_vectors", "hybrid", "token_table"]  # that ask a router of a later layer
QUICK = [(TINY[0], "gate"), (TINY[1], "default_vectors")]
BESIDE = ["expert_map", "routing_path"]  # that have work done in a process


class Case(NamedTuple):
    """An engine with half of its experts resident, and what plain transformers says."""

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


@pytest.fixture(scope="module")
def demo() -> Iterator[Case]:
    settings = Settings({"budget": "50%", "scope": "global", "link": "own"})
    case = open_case(model_path("demo"), LoadSpec.checked("demo", settings, dtype="float32", context=256))
    yield case
    case.engine.unload()


@pytest.fixture(scope="module")
def exact(model: Path) -> Iterator[Engine]:
    settings = Settings({"budget": "50%", "scope": "global"})
    engine = Engine.load(LoadSpec.checked(str(model), settings, dtype="float32", context=256))
    engine.use_profile(drawn_profile(engine))
    yield engine
    engine.unload()


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
    """Everything that is named from now on."""
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


@pytest.mark.long(0.1)
@pytest.mark.parametrize("name", NAMES)
def test_no_predictor_changes_a_logit_of_the_demo_model(demo: Case, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check(demo, name, monkeypatch)


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
def test_a_layer_waits_for_the_device_once_more_at_most(
    exact: Engine, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
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
def test_every_predictor_names_experts_in_either_scope(
    exact: Engine, name: str, scope: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also more than there are slots for."""
    exact.change({"predictor": name, "scope": scope, "budget": "50%"})
    exact.predictor_host.predictor.patient = True
    predicted = captured_predictions(exact, monkeypatch)
    passes(exact)
    assert predicted and all(0 <= g.score <= 1 for g in predicted)
    exact.expert_cache.check_integrity()
    exact.change({"scope": "global", "predictor": "none"})


class Listener(Predictor):
    """Names nothing; keeps what it is told of the request."""

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


@pytest.mark.parametrize("name", NEEDY)
def test_without_a_profile_a_predictor_that_needs_one_says_what_to_do(exact: Engine, name: str) -> None:
    profile = exact.profile
    exact.change({"predictor": "gate"})
    exact.use_profile(None)
    kept = exact.predictor_host.predictor
    with pytest.raises(SettingError, match=r"needs a profile of this model: run python launch\.py calibrate"):
        exact.change({"predictor": name, "budget": "60%"})
    assert exact.settings["predictor"] == "gate" and exact.settings["budget"] == "50%"
    assert exact.predictor_host.predictor is kept
    exact.use_profile(profile)
    exact.change({"predictor": name})
    with pytest.raises(SettingError, match="needs a profile of this model"):
        exact.use_profile(None)
    assert exact.profile is profile
    exact.change({"predictor": "none"})


def test_a_load_finds_the_models_profile_or_says_what_to_do(exact: Engine, model: Path) -> None:
    spec = LoadSpec.checked(str(model), Settings({"budget": "50%", "predictor": "estimator"}), context=256)
    with pytest.raises(SettingError, match="needs a profile of this model"):
        Engine.load(spec)
    with pytest.raises(SettingError, match="needs a profile of this model"):
        Engine.load(spec, profile=lambda model_hash: None)
    loaded = Engine.load(spec, profile={exact.model_hash: exact.profile}.get)
    assert loaded.profile is exact.profile and loaded.predictor_host.predictor.needs
    loaded.unload()


def test_a_profile_of_another_model_is_refused(exact: Engine, demo: Case) -> None:
    profile = exact.profile
    with pytest.raises(ProfileError, match="demo"):
        exact.use_profile(demo.engine.profile)
    assert exact.profile is profile


def test_another_profile_acts_from_the_next_pass_on(exact: Engine) -> None:
    exact.change({"predictor": "estimator"})
    before = exact.predictor_host.predictor
    fresh = drawn_profile(exact, seed=1)
    answer: Any = exact.generate("Why?", Sampling(max_new_tokens=3))
    next(answer)
    exact.use_profile(fresh)
    assert exact.profile is fresh and exact.predictor_host.predictor is before
    next(answer)
    next(answer)
    assert exact.predictor_host.profile is fresh and exact.predictor_host.predictor is not before
    list(answer)
    exact.change({"predictor": "none"})


@pytest.mark.parametrize("quasi", [False, True], ids=["hidden", "quasi"])
def test_the_profile_says_what_the_estimator_is_fed(
    exact: Engine, quasi: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Quasi-hidden states are made for it alone if it was trained on them, also when the profile changes under it."""
    exact.change({"predictor": "estimator"})
    kept, plain = exact.profile, passes(exact)
    exact.use_profile(drawn_profile(exact, quasi=quasi))
    made, fed = list[torch.Tensor](), list[torch.Tensor]()
    host, net = exact.predictor_host, exact.predictor_host.estimator
    default, probabilities = host.default, net.probabilities

    def noted(*args: Any) -> torch.Tensor | None:
        made.append(found := default(*args))  # type: ignore[arg-type]
        return found

    monkeypatch.setattr(host, "default", noted)
    monkeypatch.setattr(net, "probabilities", lambda states, layer: fed.append(states) or probabilities(states, layer))
    logits, tokens = passes(exact)
    assert torch.equal(logits, plain[0]) and tokens == plain[1]
    assert len(fed) == (STEPS + 1) * (exact.shape.layers - 1)
    assert [id(state) for state in fed] == [id(state) for state in made] if quasi else not made
    monkeypatch.undo()
    exact.use_profile(kept)
    exact.change({"predictor": "none"})


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
def test_a_process_beside_that_dies_is_said_once_and_computing_goes_on(
    exact: Engine, name: str, caplog: Logged
) -> None:
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
