"""Routers' own rules for gate weights, found out from their answers, on every architecture."""

import math
from typing import Any

import pytest
import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from core.hf.adapters import adapt
from core.hf.discover import RouterOutput, find_experts
from core.hf.watch import Seen, watch
from core.hf.weighing import Rule, rule_of, rules_of
from tests.checkpoints import ARCHITECTURES, EXTRA, MORE, random_model
from tests.selection import layered

KNOWN = [arch for arch in (*ARCHITECTURES, *EXTRA, *MORE) if arch in CONFIG_MAPPING]
WITHOUT = ["phimoe", "inkling_text"]  # weighs by order of selection; shares one sum with its shared experts
SCALED = {
    "deepseek_v2": 1.5,
    "deepseek_v3": 2.5,
    "deepseek_v32": 2.5,
    "bailing_hybrid": 2.5,
    "exaone_moe": 2.5,
    "glm4_moe_lite": 1.8,
}
SIGMOID = (
    "glm4_moe deepseek_v3 minimax_m2 dots1 lfm2_moe nemotron_h bailing_hybrid glm4_moe_lite deepseek_v32 exaone_moe"
).split()
LOGITS = torch.tensor([[math.log(4), math.log(2), math.log(1), math.log(1)], [0.0, math.log(3), 0.0, 0.0]])
IDS = torch.tensor([[0, 1], [1, 3]])


@pytest.mark.parametrize("dtype", layered([torch.float32, torch.bfloat16], quick=lambda dtype: dtype == torch.float32))
@pytest.mark.parametrize("arch", KNOWN)
@torch.no_grad()
def test_a_routers_rule_gives_its_own_weights(arch: str, dtype: torch.dtype) -> None:
    model = random_model(arch, dtype=dtype).eval()
    adapt(model)
    sites, answers, received = find_experts(model), list[RouterOutput](), list[torch.Tensor]()

    def keep(seen: Seen) -> None:
        answers.append(seen.output)

    rules = rules_of(model, sites)
    for site in sites:
        site.module.register_forward_pre_hook(lambda module, args: received.append(args[2]))
    with watch(model, sites, keep, norms=False):
        model(torch.arange(3, 27).view(2, 12))
    for rule, answer, weights in zip(rules, answers, received, strict=True):
        assert torch.equal(answer.weights.to(weights.dtype), weights)  # the block gives its experts just these
        assert (rule is None) == (rule_of(answer) is None) == (arch in WITHOUT)
        if rule is not None:
            told = rule.weigh(answer.logits, answer.ids)
            assert told.dtype == answer.weights.dtype
            torch.testing.assert_close(told, answer.weights, rtol=4 * torch.finfo(told.dtype).eps, atol=0.0)
            assert rule.scale == pytest.approx(SCALED.get(arch, 1.0), rel=1e-6 if dtype == torch.float32 else 1e-3)
            assert (rule.score == "sigmoid") == (arch in SIGMOID)


@pytest.mark.parametrize("setting", [{}, {"norm_topk_prob": False}])
def test_a_rule_follows_the_config(setting: dict[str, Any]) -> None:
    model = random_model("deepseek_v3", routed_scaling_factor=2.446, **setting).eval()
    for rule in rules_of(model, find_experts(model)):
        assert rule == Rule("sigmoid", not setting, 2.446, torch.float32)


@pytest.mark.skipif("afmoe" not in CONFIG_MAPPING, reason="the installed transformers has no afmoe")
def test_a_router_that_takes_whole_texts_alone() -> None:
    model = random_model("afmoe").eval()
    for rule in rules_of(model, find_experts(model)):
        assert rule == Rule("sigmoid", True, 1.0, torch.float32)


def test_softmax_by_hand() -> None:
    """Softmax of the first row: 4/8, 2/8, 1/8, 1/8; of the second: 1/6, 3/6, 1/6, 1/6."""
    others = torch.tensor([[1, 3], [0, 1]])
    whole = rule_of(RouterOutput(LOGITS, torch.tensor([[1 / 2, 1 / 4], [1 / 2, 1 / 6]]) * 3, IDS))
    assert whole == Rule("softmax", False, 3.0, torch.float32)
    assert whole.weigh(LOGITS, others) == pytest.approx(torch.tensor([[0.75, 0.375], [0.5, 1.5]]))
    normalised = rule_of(RouterOutput(LOGITS, torch.tensor([[2 / 3, 1 / 3], [3 / 4, 1 / 4]]), IDS))
    assert normalised == Rule("softmax", True, 1.0, torch.float32)
    assert normalised.weigh(LOGITS, others) == pytest.approx(torch.tensor([[2 / 3, 1 / 3], [0.25, 0.75]]))


def test_sigmoid_by_hand() -> None:
    """Sigmoid of log x is x / (x + 1): 4/5, 2/3, 1/2, 1/2 and 1/2, 3/4, 1/2, 1/2."""
    plain = rule_of(RouterOutput(LOGITS, torch.tensor([[4 / 5, 2 / 3], [3 / 4, 1 / 2]]), IDS))
    assert plain == Rule("sigmoid", False, 1.0, torch.float32)
    assert plain.weigh(LOGITS, torch.tensor([[2, 0], [0, 1]])) == pytest.approx(torch.tensor([[0.5, 0.8], [0.5, 0.75]]))
    normalised = rule_of(RouterOutput(LOGITS, torch.tensor([[6 / 11, 5 / 11], [3 / 5, 2 / 5]]) * 2.5, IDS))
    assert normalised == Rule("sigmoid", True, 2.5, torch.float32)
    assert normalised.weigh(LOGITS, torch.tensor([[1, 2], [0, 1]])) == pytest.approx(
        torch.tensor([[10 / 7, 7.5 / 7], [1.0, 1.5]])
    )


def test_weights_that_no_rule_gives() -> None:
    weights = torch.tensor([[0.5, 0.25], [0.5, 0.16]])
    assert rule_of(RouterOutput(LOGITS, weights, IDS)) is None
    with pytest.raises(ValueError, match="2 tokens"):
        rule_of(RouterOutput(LOGITS[:1], weights[:1], IDS[:1]))


def test_experts_so_unlikely_that_their_softmax_is_zero_still_share_a_token() -> None:
    """Normalised over the selected: e^-200 and e^-201 of all are 0 in fp32, of each other they are not."""
    rule = Rule("softmax", True, 1.0, torch.float32)
    told = rule.weigh(torch.tensor([[0.0, -200.0, -201.0]]), torch.tensor([[1, 2]]))
    assert told == pytest.approx(torch.tensor([[math.e / (1 + math.e), 1 / (1 + math.e)]]))
