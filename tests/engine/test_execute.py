"""Predictions executed: a layer computes what was predicted for it, as a plain model with hooks on its routers does."""

import functools
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import DynamicCache

from core.engine import Engine
from core.errors import SettingError
from core.hf.discover import RouterOutput
from core.hf.files import model_path
from core.policy.predict import Prediction
from core.runtime.prediction import predictor_host
from core.runtime.prediction.speculation import PredictedRouting
from core.settings.config import Settings
from core.settings.loading import LoadSpec
from core.settings.registry import variants
from core.settings.sampling import Sampling
from core.types import Outcome
from tests.checkpoints import make_checkpoint
from tests.engine.hooked import STEPS, hooked, near, passes, routers_of
from tests.engine.profiles import drawn_profile
from tests.equality.passes import plain_transformers
from tests.selection import by_turns, layered
from tests.tiny_tokenizer import save_tokenizer

ABLE = ["gate", "default_vectors", "estimator", "hybrid"]
OFF = {"execute": "off", "predictor": "none"}


class Case(NamedTuple):
    engine: Engine
    plain: Any  # transformers' own model of the same weights
    logits: torch.Tensor  # what it says


@pytest.fixture(
    scope="module", params=layered(["qwen3_moe", "deepseek_v3", "demo"], quick=lambda name: name == "deepseek_v3")
)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    """Of different kinds: plain; routers with a bias, groups and a scale, that weigh by sigmoids; the demo model."""
    name, path = request.param, model_path("demo")
    if name != "demo":
        path = save_tokenizer(make_checkpoint(name, tmp_path_factory.mktemp(name), num_hidden_layers=4))
    spec = "demo" if name == "demo" else str(path)
    settings = Settings({"budget": "50%", "link": "own", "quality_rate": 0})
    engine = Engine.load(LoadSpec.checked(spec, settings, dtype="float32", context=256))
    engine.use_profile(drawn_profile(engine))
    plain = plain_transformers(path, torch.float32)
    yield Case(engine, plain, passes(plain, DynamicCache(config=plain.config)))
    engine.unload()


@pytest.fixture
def engine(case: Case) -> Iterator[Engine]:
    before = dict(case.engine.settings)
    yield case.engine
    case.engine.change(before)


def executed(engine: Engine, **settings: object) -> torch.Tensor:
    engine.change({"predictor": "gate", "execute": "always", **settings})
    logits = passes(engine.model, engine.fresh_cache())
    engine.expert_cache.check_integrity()
    return logits


def test_routers_asked_early_are_executed(case: Case, engine: Engine) -> None:
    """Prompt and single tokens; the prediction one layer before counts, however many layers ahead are asked."""
    routers = routers_of(case.plain)
    wanted = hooked(case.plain, routers, lambda layer, own, before: routers[layer].forward(before))
    assert not near(wanted, case.logits)
    for distance in (1, 3):
        assert near(executed(engine, **{"predictor.distance": distance}), wanted)
    engine.parts.prediction.throttle.enabled = True  # prefetching is paused at first, what is computed is not
    assert near(passes(engine.model, engine.fresh_cache()), wanted)
    engine.parts.prediction.throttle.enabled = False
    engine.change({"execute": "off"})
    assert torch.equal(passes(engine.model, engine.fresh_cache()), case.logits)


def test_prompts_take_what_their_routers_choose_unless_asked_otherwise(engine: Engine) -> None:
    for changes in ({"execute": "always"}, {"execute": "verify", "execute_share": 0.0}, {"execute_prefill": True}):
        engine.change({"predictor": "gate", "quality_rate": 0, **changes})
        steps = [piece.step for piece in engine.generate("What?", Sampling(max_new_tokens=4)) if piece.step is not None]
        [prefill] = [step for step in steps if step.phase == "prefill"]
        assert sum(step.changed for step in steps if step.phase == "decode") > 0
        assert (prefill.changed == 0) == prefill.exact == ("execute_prefill" not in changes)


def test_an_expert_is_requested_once_however_it_comes_to_be_computed(engine: Engine) -> None:
    """One that the prediction leaves out may be what stands in for a missing one of those that it names."""
    stands_in = {"predictor": "gate", "execute": "always", "miss": "substitute", "substitute": "random", "rho": 64}
    engine.change({**stands_in, "budget": "62.5%", "link": "emulated", "link_gbps": 0.05})
    asked = (engine.generate(f"What {n}?", Sampling(max_new_tokens=12)) for n in range(3))
    steps = [piece.step for pieces in asked for piece in pieces if piece.step]
    for step in steps:
        eids = step.layer.astype(int) * engine.shape.experts + step.expert
        assert len(set(eids.tolist())) == len(eids), step.phase
    outcomes = {int(outcome) for step in steps for outcome in step.outcome}
    assert {Outcome.HIT, Outcome.PREDICTED} <= outcomes


def test_true_weights_for_predicted_experts(case: Case, engine: Engine) -> None:
    """The weights by hand: of the true router's scores of the predicted experts, as this model normalises them."""
    routers = routers_of(case.plain)
    sigmoid, scale = (case.plain.config.model_type == "deepseek_v3"), getattr(routers[0], "routed_scaling_factor", 1.0)

    def answer(layer: int, own: Any, before: torch.Tensor) -> Any:
        ids = routers[layer].forward(before)[2]
        scores = (own[0].float().sigmoid() if sigmoid else own[0].float().softmax(-1)).gather(-1, ids)
        if getattr(routers[layer], "norm_topk_prob", True):
            scores = scores / scores.sum(-1, keepdim=True)
        return own[0], scores * scale, ids

    wanted = hooked(case.plain, routers, answer)
    assert near(executed(engine, execute_weights="true"), wanted)
    verified = executed(engine, execute="verify", execute_share=0)
    assert torch.equal(verified, executed(engine, execute_weights="true"))
    assert not near(wanted, case.logits)


def test_the_estimators_distribution_is_executed(case: Case, engine: Engine) -> None:
    routers = routers_of(case.plain)
    sigmoid, scale = (case.plain.config.model_type == "deepseek_v3"), getattr(routers[0], "routed_scaling_factor", 1.0)

    def answer(layer: int, own: Any, before: torch.Tensor) -> Any:
        predicted = engine.predictor_host.estimator.probabilities(before.reshape(-1, before.shape[-1]), layer)
        scores, ids = predicted.topk(engine.shape.top_k)
        scores = scores / (1 + scores) if sigmoid else scores  # the sigmoid of log p
        if getattr(routers[layer], "norm_topk_prob", True):
            scores = scores / scores.sum(-1, keepdim=True)
        return own[0], scores * scale, ids

    got = executed(engine, predictor="estimator")
    assert near(got, hooked(case.plain, routers, answer))
    assert not near(got, case.logits)


def test_default_vectors_follow_what_is_executed(case: Case, engine: Engine) -> None:
    """q = Norm(r + D): D is made of the experts and weights that the layer computes, which are not its router's."""
    blocks = [block for block in case.plain.model.layers if hasattr(block.mlp, "experts")]
    profile, routers = engine.profile, routers_of(case.plain)
    assert profile is not None and profile.defaults is not None
    vectors = torch.from_numpy(profile.defaults).float()
    residual: dict[int, torch.Tensor] = {}
    computed: dict[int, Any] = {}

    def answer(layer: int, own: Any, before: torch.Tensor) -> Any:
        _, weights, ids = computed[layer - 1]
        predicted = (weights[..., None] * vectors[layer - 1][ids]).sum(1)
        state = blocks[layer].post_attention_layernorm.forward(residual[layer - 1].reshape(predicted.shape) + predicted)
        computed[layer] = routers[layer].forward(state)
        return computed[layer]

    def first(module: Any, args: tuple[Any, ...], output: Any) -> None:
        computed[0] = output

    with ExitStack() as hooks, routers[0].register_forward_hook(first):
        for layer, block in enumerate(blocks):
            kept = functools.partial(lambda layer, module, args: residual.update({layer: args[0]}), layer)
            hooks.enter_context(block.post_attention_layernorm.register_forward_pre_hook(kept))
        wanted = hooked(case.plain, routers, answer)
    assert near(executed(engine, predictor="default_vectors"), wanted)
    assert not near(wanted, case.logits)


@pytest.mark.parametrize("predictor", ABLE)
def test_verified_wholly_nothing_changes(case: Case, engine: Engine, predictor: str) -> None:
    logits = executed(engine, predictor=predictor, execute="verify", execute_share=1)
    assert torch.equal(logits, case.logits)


@pytest.mark.parametrize("weights", ["predicted", "true"])
def test_true_ones_change_nothing(case: Case, engine: Engine, weights: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The routers' own answers are recorded, and given in the place of their early ones."""
    true: dict[tuple[int, int], RouterOutput] = {}
    step_now = [0]
    engine.change({"predictor": "gate", "execute": "off"})
    engine.predictor_host.enable_outputs(router=True, predictions=False)
    predict = engine.predictor_host.predict

    def record(layer: int, *args: Any) -> Sequence[Prediction]:
        true[step_now[0], layer] = RouterOutput(*(t.clone() for t in engine.predictor_host.output(layer)))
        return predict(layer, *args)

    def at(step: int) -> None:
        step_now[0] = step

    with monkeypatch.context() as recording:
        recording.setattr(engine.predictor_host, "predict", record)
        assert torch.equal(passes(engine.model, engine.fresh_cache(), at), case.logits)
    monkeypatch.setattr(predictor_host, "answer", lambda site, *rest: true[step_now[0], site.index])
    engine.change({"execute": "always", "execute_weights": weights})
    assert torch.equal(passes(engine.model, engine.fresh_cache(), at), case.logits)


@pytest.mark.parametrize(("predictor", "mode"), by_turns(ABLE, ("always", "verify")))
def test_executed_ones_come_first(engine: Engine, predictor: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when the predictor itself may name but one expert, and none so unlikely."""
    issue, keep = engine.expert_cache.prefetch, engine.predictor_host.set_predicted
    predicted: dict[int, PredictedRouting] = {}
    seen: list[int] = []

    def kept(one: PredictedRouting) -> None:
        predicted[one.layer] = one
        keep(one)

    def prefetch(predictions: Sequence[Prediction], at: int, *more: Any) -> None:
        if at + 1 < engine.shape.layers:
            ids = set(predicted[at + 1].ids.flatten().tolist())
            first = engine.expert_cache.prefetch_queue.schedule.sort(predictions, at)[: len(ids)]
            assert {(prediction.layer, prediction.expert) for prediction in first} == {(at + 1, one) for one in ids}
            assert all(prediction.score == 1.0 for prediction in first) or mode == "verify"
            assert predicted[at + 1].ids.shape[1] == engine.shape.top_k
            seen.append(at)
        issue(predictions, at, *more)

    monkeypatch.setattr(engine.predictor_host, "set_predicted", kept)
    monkeypatch.setattr(type(engine.expert_cache), "prefetch", lambda self, *args: prefetch(*args))
    executed(
        engine, predictor=predictor, execute=mode, execute_share=0.5, **{"predictor.width": 1, "predictor.floor": 1.0}
    )
    assert len(seen) == (engine.shape.layers - 1) * (2 + STEPS)


@pytest.mark.parametrize("name", [v.name for v in variants("predictor") if v.name not in ABLE])
def test_predictors_that_tell_no_routing_are_refused(engine: Engine, name: str) -> None:
    for first, then in (
        ({"predictor": name}, {"execute": "always"}),
        ({"predictor": "gate", "execute": "verify"}, {"predictor": name}),
    ):
        engine.change({**OFF, **first})
        with pytest.raises(SettingError, match="Default vectors, Estimator, Estimator where needed, Next-layer gate"):
            engine.change(then)


def test_an_engine_refuses_what_its_router_cannot_do(tmp_path: Path) -> None:
    """phimoe weighs by the order of its selection. Predicted weights need no rule."""
    path = save_tokenizer(make_checkpoint("phimoe", tmp_path))
    needy = Settings({"budget": "50%", "predictor": "gate", "execute": "verify"})
    with pytest.raises(SettingError, match="weighs its experts is not known"):
        Engine.load(LoadSpec.checked(str(path), needy, context=256))
    engine = Engine.load(LoadSpec.checked(str(path), needy.with_({"execute": "always"}), context=256))
    plain = plain_transformers(path, torch.float32)
    routers = routers_of(plain)
    wanted = hooked(plain, routers, lambda layer, own, before: routers[layer].forward(before))
    assert near(passes(engine.model, engine.fresh_cache()), wanted)
    with pytest.raises(SettingError, match="weighs its experts is not known"):
        engine.change({"execute_weights": "true"})
    engine.unload()


def test_others_are_told_what_routers_answer_and_what_was_named(case: Case, engine: Engine) -> None:
    engine.change(OFF)
    predictor_host, hooks = engine.predictor_host, engine.loaded.sites[0].router._forward_hooks
    before = len(hooks)
    for name, named in (("none", 0.0), ("all_next", 1.0)):
        engine.change({"predictor": name})
        predictor_host.enable_outputs(router=True, predictions=True)
        assert torch.equal(passes(engine.model, engine.fresh_cache()), case.logits)
        last = engine.shape.layers - 1
        assert predictor_host.output(last).logits.shape == (1, engine.shape.experts)
        scores = predictor_host.predicted_scores(0)
        assert scores.shape == (engine.shape.experts,) and bool((scores > 0).all()) == bool(named)
        assert not predictor_host.predicted_scores(0).any()  # once
    predictor_host.enable_outputs(router=False, predictions=False)
    assert len(hooks) == before
