"""Routers watched: what they are given and answer, and the norms before them, on every architecture."""

from typing import Any, NamedTuple

import pytest
import torch
from transformers import AutoModelForCausalLM

from core.hf.adapters import adapt
from core.hf.discover import ExpertsSite, find_experts
from core.hf.norms import RouterContext
from core.hf.watch import Seen, ask, context_of, norm_of, watch
from tests.architectures.tiny import tiny
from tests.architectures.trial import known, random_model
from tests.checkpoints import ARCHITECTURES, EXTRA
from tests.conftest import Checkpoint
from tests.logged import Logged
from tests.selection import layered

IDS = torch.arange(3, 27).view(2, 12)
EVERY = [*ARCHITECTURES, *EXTRA, "flex_olmo", "jamba", "nemotron_h", "inkling_text"]
QUICK = ("qwen3_moe", "gpt_oss", "deepseek_v3", "flex_olmo", "nemotron_h")
AFTER_ITS_NORM = ["flex_olmo"]  # the router is given the residual stream itself


class Case(NamedTuple):
    arch: str
    model: Any
    sites: list[ExpertsSite]


@pytest.fixture(scope="module", params=layered(EVERY, quick=lambda arch: arch in QUICK))
def case(request: pytest.FixtureRequest, checkpoint: Checkpoint) -> Case:
    path = checkpoint(request.param)
    model = AutoModelForCausalLM.from_pretrained(path, dtype="auto", experts_implementation="grouped_mm").eval()
    adapt(model)
    return Case(request.param, model, find_experts(model))


def hooks(model: Any) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


@torch.no_grad()
def test_what_is_seen_is_what_the_model_computes(case: Case) -> None:
    plain = case.model(IDS, output_hidden_states=True)
    before, seen, embedded = hooks(case.model), list[Seen](), list[torch.Tensor]()
    kept: list[tuple[torch.Tensor, torch.Tensor | None]] = []

    def look(one: Seen) -> None:
        seen.append(one)
        kept.append((one.hidden.clone(), None if one.residual is None else one.residual.clone()))

    with watch(case.model, case.sites, look, embedded.append) as handle:
        watched = case.model(IDS)
    assert torch.equal(watched.logits, plain.logits)
    handle.remove()
    assert hooks(case.model) == before
    case.model(IDS)
    assert [one.layer for one in seen] == list(range(len(case.sites)))
    assert torch.equal(embedded[0], case.model.get_input_embeddings()(IDS).reshape(24, 64))
    for one, (hidden, residual) in zip(seen, kept, strict=True):
        site = case.sites[one.layer]
        assert hidden.shape == (24, 64)
        assert one.probs.shape == (24, 8) and one.probs.dtype == torch.float32
        assert one.probs.sum(-1) == pytest.approx(torch.ones(24))
        assert torch.equal(one.output.ids.sort(-1).values, ask(site, hidden, one).topk(site.top_k).indices.sort(-1)[0])
        norm = norm_of(site)
        assert (norm is None) == (residual is None) == (case.arch in AFTER_ITS_NORM)
        if norm is not None and residual is not None:
            assert torch.equal(norm(residual), hidden)
            assert not torch.equal(residual, hidden)


@torch.no_grad()
def test_asking_with_another_number_of_tokens(case: Case) -> None:
    seen: list[Seen] = []
    with watch(case.model, case.sites, seen.append):
        case.model(IDS)
        all_at_once = ask(case.sites[1], seen[0].hidden, seen[0])
        one = ask(case.sites[1], seen[0].hidden[5:6], seen[0])
    assert one.shape == (1, 8)
    assert one[0] == pytest.approx(all_at_once[5], abs=1e-5)


def test_how_much_of_the_experts_output_a_layer_adds(case: Case) -> None:
    with watch(case.model, case.sites, lambda seen: None):
        *inner, last = [context_of(site).scale for site in case.sites]
    assert last is None
    normed_after = case.arch in (*AFTER_ITS_NORM, "inkling_text")  # a norm or a convolution behind the experts
    assert all((scale is None) if normed_after else scale == pytest.approx(1.0, abs=1e-5) for scale in inner)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("arch", ["granitemoe", "granitemoeshared"])
def test_a_multiplied_residual_is_found(arch: str, dtype: torch.dtype, checkpoint: Checkpoint) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint(arch), dtype=dtype).eval()
    for module in model.modules():
        if hasattr(module, "residual_multiplier"):
            module.residual_multiplier = 0.22  # what the released granite models have
    sites = find_experts(model)
    with watch(model, sites, lambda seen: None):
        assert context_of(sites[0]).scale == pytest.approx(0.22, rel=0.01)


ALL_SPARSE = {"mlp_layer_types": ["sparse"] * 4}
STREAMS: dict[str, dict[str, Any]] = {
    "hy_v4": ALL_SPARSE,
    "qwen4_exp_text": {},
    "glm5_next": {"text_config": {"model_type": "glm5_next_text", **tiny("glm5_next_text"), **ALL_SPARSE}},
}


@pytest.mark.parametrize("model_type", [name for name in STREAMS if known(name)])
def test_a_layer_with_several_residual_streams_adds_the_experts_output_to_none(model_type: str) -> None:
    model = random_model(model_type, **STREAMS[model_type]).eval()
    adapt(model)
    sites = find_experts(model)
    assert len(sites) > 1
    with watch(model, sites, lambda seen: None):
        assert [context_of(site).scale for site in sites] == [None] * len(sites)


def test_a_model_that_needs_its_experts_is_watched_without_norms(checkpoint: Checkpoint, caplog: Logged) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint("qwen3_moe"), dtype="auto").eval()
    sites, seen = find_experts(model), list[Seen]()

    def refuse(module: Any, args: object, kwargs: dict[str, object]) -> None:
        if kwargs["use_cache"] is False:
            raise ValueError("no cache was given")

    model.register_forward_pre_hook(refuse, with_kwargs=True)
    with watch(model, sites, seen.append):
        model(IDS, use_cache=True)
    assert [one.residual for one in seen] == [None] * len(sites)
    assert [context_of(site) for site in sites] == [RouterContext(None, None)] * len(sites)
    assert "no cache was given" in caplog.text


def test_looking_for_norms_leaves_no_trace_and_runs_once(checkpoint: Checkpoint) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint("qwen3_moe"), dtype="auto").eval()
    sites, passes, before = find_experts(model), list[object](), hooks(model)
    counter = model.register_forward_pre_hook(lambda module, args: passes.append(args))
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for _ in range(2):
        watch(model, sites, lambda seen: None).remove()
    counter.remove()
    assert len(passes) == 1
    assert hooks(model) == before
    assert all("forward" not in vars(site.module) for site in sites)
    assert state.keys() == model.state_dict().keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
