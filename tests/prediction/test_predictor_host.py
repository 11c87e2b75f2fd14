"""What predictors are shown of a real model, against the same computed in plain torch."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from core.hf.discover import ExpertsSite, find_experts
from core.hf.hooks import install, probe_router
from core.hf.norms import quasi_hidden
from core.hf.watch import norm_of, watch
from core.policy.predict import Prediction, Predictor, View
from core.policy.predict.nets import estimator, path
from core.policy.predict.nets.estimator import Estimator
from core.policy.predict.nets.path import RoutingPathNet, State
from core.policy.predict.path_messages import Share, answered, asked
from core.policy.predict.path_reader import ROOM, WINDOW, PathReader
from core.policy.predict.worker import WorkerTask
from core.profile import Profile
from core.runtime.prediction.predictor_host import PredictorHost
from core.runtime.prediction.view import _asked
from core.types import ModelShape
from tests.conftest import Checkpoint

PROMPT = torch.arange(3, 15)[None]
ONE = torch.tensor([[7]])


class Looker(Predictor):
    """Does with every view what the test says; its results by layer."""

    asks = True
    defaults = True
    starts = True

    def __init__(self, predict: Callable[[View], Any]) -> None:
        self._look, self.found = predict, dict[int, Any]()

    def begin(self, view: View) -> Sequence[Prediction]:
        return self.predict(view)

    def predict(self, view: View) -> Sequence[Prediction]:
        self.found[view.layer] = self._look(view)
        return ()


class Layer(NamedTuple):
    """What one layer really did."""

    hidden: torch.Tensor
    residual: torch.Tensor | None
    args: Any
    kwargs: Any
    probs: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor


class Opened(NamedTuple):
    model: Any
    sites: list[ExpertsSite]
    shape: ModelShape
    profile: Profile


def with_defaults(model: Any) -> Opened:
    """A profile of it has default vectors."""
    sites = find_experts(model)
    shape = ModelShape(len(sites), sites[0].num_experts, sites[0].top_k, 64, 0)
    defaults = np.random.default_rng(0).standard_normal((shape.layers, shape.experts, 64)).astype(np.float16)
    profile = Profile("tiny", "hash", shape.layers, shape.experts, shape.top_k, 64, 9, "a test", "", defaults=defaults)
    return Opened(model, sites, shape, profile)


@pytest.fixture(scope="module", params=["qwen3_moe", "deepseek_v3", "granitemoe"])
def opened(request: pytest.FixtureRequest, checkpoint: Checkpoint) -> Opened:
    model = AutoModelForCausalLM.from_pretrained(checkpoint(request.param), dtype="auto").eval()
    for module in model.modules():
        if hasattr(module, "residual_multiplier"):
            module.residual_multiplier = 0.22
    return with_defaults(model)


@torch.inference_mode()
def predict(
    opened: Opened, ids: torch.Tensor, what: Callable[[View], Any], profile: Profile | None = None
) -> tuple[dict[int, Any], list[Layer]]:
    """Run a pass; what `what` finds at every layer, and what the layers did."""
    real: list[Layer] = []
    predictor_host = PredictorHost(opened.model, opened.sites, opened.shape)
    predictor_host.use("gate", {}, profile or opened.profile)
    predictor_host.close()
    predictor_host.predictor = looker = Looker(what)
    predictor_host.profile = profile or opened.profile
    predictor_host._watch = watch(opened.model, opened.sites, predictor_host._keep)
    calls: list[Any] = []

    def experts(site: ExpertsSite, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        seen = calls[-1]
        residual = None if seen.residual is None else seen.residual.clone()
        given = seen.args, seen.kwargs, seen.probs
        real.append(Layer(seen.hidden.clone(), residual, *given, chosen.clone(), weights.clone()))
        predictor_host.predict(site.index, chosen.tolist(), weights)
        result: torch.Tensor = ALL_EXPERTS_FUNCTIONS["grouped_mm"](site.module, hidden, chosen, weights)
        return result

    with watch(opened.model, opened.sites, calls.append), install(opened.model, opened.sites, experts):
        predictor_host.begin([(1, ids[0].tolist())])
        predictor_host.predict_first()
        opened.model(ids)
    predictor_host.close()
    return looker.found, real


def some_asks(probs: torch.Tensor, k: int) -> Any:
    """[E] 1 - product over tokens of (1 - p)^k."""
    return (1.0 - (1.0 - probs.double()).prod(0) ** k).numpy()


@pytest.mark.parametrize("ids", [ONE, PROMPT], ids=["decode", "prefill"])
def test_a_later_router_asked_on_this_layers_input(opened: Opened, ids: torch.Tensor) -> None:
    layers, k = opened.shape.layers, opened.shape.top_k
    found, real = predict(opened, ids, lambda view: None if view.layer < 0 else view.ask(range(view.layer, layers)))
    for layer in range(layers):
        assert found[layer].shape == (layers - layer, opened.shape.experts)
        for predicted, of in zip(found[layer], range(layer, layers), strict=True):
            wanted = probe_router(opened.sites[of], real[layer].args, real[layer].kwargs)
            assert predicted == pytest.approx(some_asks(wanted, k), abs=1e-6)
        if len(ids[0]) == 1:  # of itself it knows what it chose
            assert set(np.argsort(-found[layer][0])[:k].tolist()) == set(real[layer].ids[0].tolist())


def test_a_choice_that_is_not_the_likeliest_still_comes_first_by_hand() -> None:
    """A router with a correction bias chose 2 and 3, whose logits are the lowest."""
    predicted = _asked(np.log([[0.4, 0.3, 0.2, 0.1]]), np.array([[3, 2]]), 2)[0]
    assert set(np.argsort(-predicted)[:2].tolist()) == {2, 3}
    assert predicted == pytest.approx([1 - 0.6**2, 1 - 0.7**2, 1 - 0.6**2, 1 - 0.6**2], abs=1e-6)
    assert min(predicted[2], predicted[3]) > predicted[0]
    for spread in (1e-6, 1e-3, 0.2):
        p = np.array([[1 - 3 * spread, spread, spread, spread]])
        assert np.argmax(_asked(np.log(p), np.array([[1]]), 1)[0]) == 1


@pytest.mark.parametrize("ids", [ONE, PROMPT], ids=["decode", "prefill"])
def test_the_quasi_hidden_state_by_its_formula(opened: Opened, ids: torch.Tensor) -> None:
    """q = Norm(r + c * sum g_e d_e), with c = .22 for granite and 1 for the others."""
    layers, k = opened.shape.layers, opened.shape.top_k
    found, real = predict(
        opened, ids, lambda view: view.ask((view.layer + 1,), "default")[0] if 0 <= view.layer < layers - 1 else None
    )
    scale = 0.22 if "Granite" in type(opened.model).__name__ else 1.0
    vectors = torch.from_numpy(opened.profile.defaults).float()
    for layer in range(layers - 1):
        one, norm = real[layer], norm_of(opened.sites[layer + 1])
        assert one.residual is not None and norm is not None
        mean = torch.stack(
            [
                sum((w * vectors[layer, e] for e, w in zip(row, ws, strict=True)), torch.zeros(64))
                for row, ws in zip(one.ids.tolist(), one.weights.float(), strict=True)
            ]
        )
        state = norm(one.residual + scale * mean)
        args = (state.reshape(one.args[0].shape), *one.args[1:])
        wanted = some_asks(probe_router(opened.sites[layer + 1], args, one.kwargs), k)
        assert found[layer] == pytest.approx(wanted, abs=1e-4)
        plain = some_asks(probe_router(opened.sites[layer + 1], one.args, one.kwargs), k)
        assert np.abs(wanted - plain).max() > 0.01  # default vectors make a difference


def test_without_a_layer_that_adds_its_experts_the_plain_input_is_asked(checkpoint: Checkpoint) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint("flex_olmo"), dtype="auto").eval()
    found, _ = predict(
        with_defaults(model),
        PROMPT,
        lambda view: None if view.layer != 0 else (view.ask((1,), "default"), view.ask((1,))),
    )
    assert np.array_equal(*found[0])


def test_weights_distribution_and_embedding(opened: Opened) -> None:
    found, real = predict(
        opened, PROMPT, lambda view: (view.weights, view.distribution()()) if view.layer >= 0 else view.embedding()()
    )
    for layer, one in enumerate(real):
        weights, distribution = found[layer]
        assert weights == pytest.approx(one.weights.float().numpy())
        assert distribution == pytest.approx(one.probs.mean(0).numpy(), abs=1e-6)
        assert distribution.sum() == pytest.approx(1.0, abs=1e-5)
    assert found[-1] == pytest.approx(opened.model.get_input_embeddings()(PROMPT)[0].mean(0).detach().numpy(), abs=1e-6)


@pytest.mark.parametrize("ids", [ONE, PROMPT], ids=["decode", "prefill"])
@pytest.mark.parametrize("kind", ["before", "hidden", "quasi"])
def test_the_estimator_is_given_the_state_that_it_was_trained_on(opened: Opened, ids: torch.Tensor, kind: str) -> None:
    """In a profile of before, which does not say, that was the router input."""
    net = Estimator(opened.shape.layers, opened.shape.experts, 64, 8, int(kind == "quasi")).eval()
    nets, settings = estimator.to_tensors(net)
    if kind == "before":
        settings = {"estimator": {k: v for k, v in net.config.items() if k != "quasi"}}
    profile = replace(opened.profile, nets=nets, settings=settings)
    found, real = predict(opened, ids, lambda view: view.estimate(1) if view.layer == 0 else None, profile)
    state = real[0].hidden
    if kind == "quasi":
        assert real[0].residual is not None
        output = torch.zeros_like(state, dtype=torch.float32)
        chosen = zip(real[0].ids.tolist(), real[0].weights.float().tolist(), strict=True)
        for row, (ids_of, weights) in enumerate(chosen):
            for expert, weight in zip(ids_of, weights, strict=True):
                output[row] += weight * torch.from_numpy(opened.profile.defaults[0, expert]).float()
        state = quasi_hidden(opened.sites[0], opened.sites[1], real[0].residual, output)
        assert not torch.allclose(state.float(), real[0].hidden.float(), atol=1e-2)
    with torch.no_grad():
        wanted = net(state, torch.tensor(1)).softmax(-1)
    assert found[0] == pytest.approx(some_asks(wanted, opened.shape.top_k), abs=1e-4)


def test_what_a_pass_is_made_of(opened: Opened) -> None:
    shape = opened.shape
    found, real = predict(
        opened, PROMPT, lambda view: (view.layers, view.experts, view.top_k, view.tokens, view.ids, view.profile)
    )
    assert found[-1][:5] == (shape.layers, shape.experts, shape.top_k, PROMPT[0].tolist(), ())
    for layer, one in enumerate(real):
        assert found[layer][3:5] == (PROMPT[0].tolist(), one.ids.tolist())
        assert found[layer][5] is opened.profile


def test_a_pass_nobody_announced_has_no_tokens(opened: Opened) -> None:
    predictor_host = PredictorHost(opened.model, opened.sites, opened.shape)
    predictor_host.predictor = looker = Looker(lambda view: view.tokens)
    predictor_host.begin([(1, [1, 2])])
    for number in range(2):
        for layer in range(opened.shape.layers):
            predictor_host.predict(layer, [[0, 1]])
            assert looker.found[layer] == ([1, 2] if number == 0 else ())


def reading(net: RoutingPathNet) -> PathReader:
    return PathReader(WorkerTask(path.NAME, net.config, {name: one.numpy() for name, one in net.state_dict().items()}))


def test_the_routing_path_follows_a_request_as_the_network_would() -> None:
    net = RoutingPathNet(3, 6, torch.arange(5, 45), d_ff=32, heads=2, d_kv=8).eval()
    prompt, answer = torch.randint(5, 45, (1, 9)), torch.randint(5, 45, (1, 3))
    with torch.no_grad():
        chances = net.decode(torch.cat((prompt, answer), 1), net.encode(prompt))[0][0].sigmoid()
    work = reading(net)
    for _ in range(2):
        work.restart()
        predicted = [work.follow(prompt[0].tolist()), *(work.follow([token]) for token in answer[0].tolist())]
        assert predicted[0] == pytest.approx(1.0 - (1.0 - chances[:9]).prod(0).numpy(), abs=1e-5)
        for at, one in enumerate(predicted[1:], 9):
            assert one == pytest.approx(chances[at].numpy(), abs=1e-5)


def test_the_routing_path_of_a_long_prompt_in_pieces_goes_on_as_the_network_would() -> None:
    """Past the window, and past the room that keys and values are kept in."""
    net = RoutingPathNet(3, 6, torch.arange(5, 45), d_ff=32, heads=2, d_kv=8).eval()
    ids = torch.randint(5, 45, (ROOM + 10,)).tolist()
    work, state = reading(net), None
    for piece in (ids[: WINDOW + 5], ids[WINDOW + 5 :], [7], [8]):
        predicted = work.follow(piece)
        idle, seen = torch.zeros(3, 6), ids[: WINDOW + 5] if state is None else ids
        with torch.no_grad():
            if len(piece) > 1:
                read = net.encode(torch.tensor([seen[-WINDOW:]]))
                state = read if state is None else State(state.own, read.prompt, None)
            assert state is not None
            for at in range(0, len(piece), WINDOW):
                logits, state = net.decode(torch.tensor([piece[at : at + WINDOW]]), state)
                idle += torch.nn.functional.logsigmoid(-logits[0]).sum(0)
        assert predicted == pytest.approx(-torch.expm1(idle).numpy(), abs=1e-5)
    assert work._texts[0].prompt == ids[-WINDOW:]  # the encoder reads the end of it


def test_several_requests_are_followed_as_each_alone() -> None:
    """Prompts and single tokens of several requests in one message, in any order; one that begins again is new."""
    net = RoutingPathNet(3, 6, torch.arange(5, 45), d_ff=32, heads=2, d_kv=8).eval()
    together, alone, chance = reading(net), {}, random.Random(3)
    for number in range(60):
        shares = []
        for request in chance.sample(range(5), chance.randint(1, 5)):
            fresh = request not in alone or chance.random() < 0.1
            if fresh:
                alone[request] = reading(net)
            tokens = [chance.randrange(5, 45) for _ in range(chance.choice((1, 1, 1, 4)) if not fresh else 7)]
            shares.append(Share(request, fresh, tokens))
        got = answered(together.work(asked(number, shares)))
        assert (got.number, got.requests) == (number, tuple(share.request for share in shares))
        for share, idle, active in zip(shares, got.idle, got.active, strict=True):
            expected = alone[share.request].follow(share.tokens)
            assert -np.expm1(idle).reshape(3, 6) == pytest.approx(expected, abs=1e-5)
            assert np.array_equal(active.reshape(3, 6), idle.reshape(3, 6) < math.log(0.5)), "above one half"
