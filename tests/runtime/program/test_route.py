"""The choice of experts and their weights."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from core.runtime.program.choose import Groups
from core.runtime.program.route import FIELDS, Route, kernel
from tests.runtime.program import oracle
from tests.runtime.program.calls import call, drawn, needs_kernels, same
from tests.selection import examples

pytestmark = needs_kernels
SCALES = drawn(9, 160)
CASES = [
    Route(64, 8, renormalised=True),
    Route(13, 13),
    Route(60, 4, bias=True, renormalised=True, epsilon=1e-12),
    Route(32, 4, "softmax_chosen"),
    Route(20, 11, "softmax_chosen"),
    Route(160, 8, "sigmoid", bias=True, renormalised=True, epsilon=1e-20, scale=2.5),
    Route(5, 1, "sigmoid"),
    Route(12, 3, renormalised=True, scales=True),
    Route(64, 6, "sigmoid", bias=True, renormalised=True, groups=Groups(8, 8, 3)),
    Route(30, 4, groups=Groups(10, 3, 2, best=1)),
]


def routed(
    spec: Route, logits: torch.Tensor, bias: torch.Tensor, splits: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    ids, weights = torch.empty(len(logits), spec.chosen, dtype=torch.int64), torch.empty(len(logits), spec.chosen)
    call(kernel(spec), FIELDS, len(logits), splits, logits=logits, bias=bias, scales=SCALES, ids=ids, weights=weights)
    return ids, weights


@pytest.mark.parametrize("spec", CASES, ids=str)
@pytest.mark.parametrize("wild", [False, True])
@examples(15, fewer=6)
@given(seed=st.integers(0, 1 << 30), tokens=st.integers(1, 4), splits=st.lists(st.integers(0, 4), max_size=3))
def test_tokens(spec: Route, wild: bool, seed: int, tokens: int, splits: list[int]) -> None:
    logits = drawn(seed, tokens, spec.experts, wild=wild)
    if seed % 2:
        logits = (logits * 2).round() / 2  # equal ones, and both zeros
    bias = drawn(seed + 1, spec.experts)
    ids, weights = routed(spec, logits, bias, splits)
    known_ids, known = oracle.route(
        logits.numpy(),
        bias.numpy() if spec.bias else None,
        spec.chosen,
        score=spec.score,
        renormalised=spec.renormalised,
        epsilon=spec.epsilon,
        scale=spec.scale,
        scales=SCALES[: spec.experts].numpy() if spec.scales else None,
        groups=(spec.groups.count, spec.groups.chosen, spec.groups.best) if spec.groups else (1, 1, 1),
    )
    assert ids.tolist() == known_ids.tolist()
    same(weights, known)


@pytest.mark.parametrize("spec", CASES, ids=str)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, -0.0])
def test_ids_are_experts_whatever_the_logits_are(spec: Route, value: float) -> None:
    logits, bias = torch.full((2, spec.experts), value), torch.full((spec.experts,), value)
    ids, _ = routed(spec, logits, bias, [])
    assert ids.tolist() == [list(range(spec.chosen))] * 2


def test_a_token_has_the_same_bits_alone() -> None:
    for spec in CASES:
        logits, bias = drawn(3, 5, spec.experts, wild=True), drawn(4, spec.experts)
        ids, weights = routed(spec, logits, bias, [])
        for token in range(5):
            alone = routed(spec, logits[token : token + 1], bias, [])
            assert alone[0].tolist() == [ids[token].tolist()]
            same(alone[1], weights[token : token + 1])


def test_it_is_what_torch_and_transformers_compute() -> None:
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Config, DeepseekV3TopkRouter

    logits, bias = drawn(1, 30, 64), drawn(2, 64)
    probabilities, chosen = logits.softmax(-1).topk(8)
    ids, weights = routed(CASES[0], logits, bias, [])
    assert torch.equal(ids, chosen)
    torch.testing.assert_close(weights, probabilities / probabilities.sum(-1, keepdim=True))
    ids, weights = routed(Route(64, 4, "softmax_chosen"), logits, bias, [])
    values, chosen = logits.topk(4)
    assert torch.equal(ids, chosen)
    torch.testing.assert_close(weights, values.softmax(-1))
    ids, weights = routed(Route(64, 6, "sigmoid", True, True, 1e-20, 2.5), logits, bias, [])
    chosen = (logits.sigmoid() + bias).topk(6).indices
    assert torch.equal(ids, chosen)
    values = logits.sigmoid().gather(1, chosen)
    torch.testing.assert_close(weights, values / values.sum(-1, keepdim=True) * 2.5)
    spec = Route(64, 6, "sigmoid", True, True, 1e-20, 2.5, groups=Groups(8, 8, 3))
    ids, weights = routed(spec, logits, bias, [])
    config = DeepseekV3Config(n_routed_experts=64, num_experts_per_tok=6, n_group=8, topk_group=3, hidden_size=64)
    router = DeepseekV3TopkRouter(config)
    with torch.no_grad():
        router.weight.copy_(torch.eye(64))
        router.e_score_correction_bias.copy_(bias)
        _, known, chosen = router(logits)
    assert torch.equal(ids.sort().values, chosen.sort().values)
    torch.testing.assert_close(weights.gather(1, ids.argsort()), known.gather(1, chosen.argsort()))
