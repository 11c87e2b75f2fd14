"""What routing is executed, against a plain implementation, and what cannot be: without a model."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from core.engine.lossy_check import check_weighable
from core.errors import SettingError
from core.hf.discover import RouterOutput
from core.hf.weighing import Rule
from core.runtime.prediction.speculation import Executing, PredictedRouting, aligned, aligned_row
from core.settings.config import Settings

STEPS = 3


@pytest.mark.parametrize(
    "change",
    [
        {"execute": "verify"},
        {"execute": "always", "execute_weights": "true"},
        {"execute": "always", "predictor": "hybrid"},
        {"execute": "always", "predictor": "estimator"},
        {"miss": "substitute", "substitute": "cache_prior"},
    ],
)
def test_without_a_rule_what_needs_one_is_refused(change: dict[str, str]) -> None:
    settings = Settings({"predictor": "gate", **change})
    rule = Rule("softmax", True, 1.0, torch.float32)
    check_weighable(settings, lambda: (rule, rule))
    with pytest.raises(SettingError, match="How this model's router weighs its experts is not known"):
        check_weighable(settings, lambda: (rule, None))


def test_what_needs_no_rule_asks_for_none() -> None:
    for change in ({}, {"execute": "always", "predictor": "gate"}, {"miss": "substitute"}, {"execute_weights": "true"}):
        check_weighable(Settings(change), lambda: pytest.fail("asked"))


def test_experts_of_both_stay_in_their_places() -> None:
    predicted = torch.tensor([[2, 5, 7], [1, 2, 3], [4, 5, 6]])
    ids = torch.tensor([[1, 2, 3], [3, 1, 2], [1, 2, 3]])
    place, changed = aligned(predicted, ids)
    assert predicted.gather(1, place).tolist() == [[5, 2, 7], [3, 1, 2], [4, 5, 6]]
    assert changed.tolist() == [[True, False, True], [False] * 3, [True] * 3]
    for row in range(3):
        assert aligned_row(predicted[row].tolist(), ids[row].tolist()) == (place[row].tolist(), changed[row].tolist())


def plain_route(
    mode: str,
    weights: str,
    share: float,
    predicted: tuple[list[int], list[float]],
    true: tuple[list[int], list[float]],
    scores: list[float],
) -> dict[int, float]:
    """expert -> weight of one token, in plain Python; weights are normalised scores."""
    if mode == "always" and weights == "predicted":
        return dict(zip(*predicted, strict=True))
    agree = set(predicted[0]) == set(true[0])
    enough = share < 1 and sum(scores[e] for e in predicted[0]) >= share * sum(scores[e] for e in true[0]) - 1e-7
    if agree or (mode == "verify" and not enough):
        return dict(zip(*true, strict=True))
    total = sum(scores[e] for e in predicted[0])
    return {e: scores[e] / total for e in predicted[0]}


@pytest.mark.parametrize(
    ("mode", "weights", "share"),
    [
        ("always", "predicted", 1.0),
        ("always", "true", 1.0),
        ("verify", "true", 0.0),
        ("verify", "true", 0.7),
        ("verify", "true", 1.0),
    ],
)
def test_routes_equal_a_plain_implementation(mode: str, weights: str, share: float) -> None:
    generator, tokens, experts, k = torch.Generator().manual_seed(3), 200, 6, 3
    logits, early = (torch.randn(2, tokens, experts, generator=generator) * 2).unbind()
    rule = Rule("softmax", True, 1.0, torch.float32)
    ids, predicted = logits.topk(k).indices, early.topk(k).indices
    true_weights, predicted_weights = rule.weigh(logits, ids), rule.weigh(early, predicted)
    part = slice(None)  # of the tokens: all, then each alone

    def take(layer: int) -> PredictedRouting | None:
        row = predicted[part][0].tolist() if part.stop else None
        return PredictedRouting(layer, predicted[part], predicted_weights[part], [], row) if layer else None

    stub: Any = SimpleNamespace(
        keep_routing=lambda on, certain: None,
        rule=lambda layer: rule,
        take_predicted=take,
        output=lambda layer: RouterOutput(logits[part], true_weights[part], ids[part]),
    )
    executing = Executing(stub)
    executing.use(mode, weights, share)
    assert executing.route(0, ids, true_weights, ids.tolist()).ids is ids
    got = executing.route(1, ids, true_weights, ids.tolist())
    scores = logits.softmax(-1).tolist()
    changed, reweighed = 0, 0
    for t in range(tokens):
        true = ids[t].tolist(), true_weights[t].tolist()
        want = plain_route(
            mode, weights, share, (predicted[t].tolist(), predicted_weights[t].tolist()), true, scores[t]
        )
        assert dict(zip(got.ids[t].tolist(), got.weights[t].tolist(), strict=True)) == pytest.approx(want, abs=1e-6)
        assert got.changed[t].tolist() == [expert not in want for expert in true[0]]
        assert got.changed[t].any() or weights == "predicted" or torch.equal(got.weights[t], true_weights[t])
        changed += sum(expert not in want for expert in true[0])
        reweighed += sum(expert in want and want[expert] != weight for expert, weight in zip(*true, strict=True))
    assert int(got.changed.sum()) == changed and (changed > 0) == (share < 1 or mode == "always")
    assert executing.take_reweighed() == (reweighed if weights == "predicted" else 0)
    assert executing.take_reweighed() == 0
    for t in range(20):
        part = slice(t, t + 1)
        alone = executing.route(1, ids[part], true_weights[part], ids[part].tolist())
        assert torch.equal(alone.ids, got.ids[part]) and torch.equal(alone.changed, got.changed[part])
        assert torch.equal(alone.weights, got.weights[part])


def test_how_much_predicted_experts_must_carry_by_hand() -> None:
    """Softmax 4/8, 2/8, 1/8, 1/8. The router chose 0 and 1: 6/8. Predicted 0 and 2 carry 5/6 of that; 2 and 3: 1/3."""
    logits = torch.tensor([[4.0, 2.0, 1.0, 1.0]] * 2).log()
    ids, predicted = torch.tensor([[0, 1]] * 2), torch.tensor([[2, 0], [3, 2]])
    rule = Rule("softmax", False, 2.0, torch.float32)
    weights = rule.weigh(logits, ids)
    stub: Any = SimpleNamespace(
        keep_routing=lambda on, certain: None,
        rule=lambda layer: rule,
        take_predicted=lambda layer: PredictedRouting(layer, predicted, weights, []),
        output=lambda layer: RouterOutput(logits, weights, ids),
    )
    executing = Executing(stub)
    for share, want in ((0.8, [[0, 2], [0, 1]]), (0.84, [[0, 1], [0, 1]]), (0.3, [[0, 2], [3, 2]])):
        executing.use("verify", "true", share)
        got = executing.route(1, ids, weights, ids.tolist())
        assert got.ids.tolist() == want
        assert got.weights == pytest.approx(torch.tensor([1.0, 0.5, 0.25, 0.25])[got.ids])
