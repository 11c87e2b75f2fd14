"""The figures by hand: divergence, perplexity, and several answers as one."""

from __future__ import annotations

import math

import pytest
import torch

from core.engine.quality.figures import divergence, log_probability, perplexity
from core.engine.quality.report import Quality, together


def logits(*probabilities: float) -> torch.Tensor:
    return torch.tensor(probabilities).log() + 3.0  # what is added to all changes nothing


def test_divergence_is_the_formula() -> None:
    """1/2 ln(1/2 / 1/4) + 1/4 ln(1/4 / 1/2) + 0 = ln 2 / 4."""
    kl, agrees = divergence(logits(0.5, 0.25, 0.25), logits(0.25, 0.5, 0.25))
    assert kl == pytest.approx(math.log(2) / 4, abs=1e-6)
    assert not agrees
    kl, agrees = divergence(logits(0.5, 0.25, 0.25), logits(0.8, 0.1, 0.1))
    assert kl == pytest.approx(0.5 * math.log(0.625) + 0.5 * math.log(2.5), abs=1e-6)
    assert agrees


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_equal_logits_diverge_by_nothing_at_all(dtype: torch.dtype) -> None:
    row = (torch.randn(500, generator=torch.Generator().manual_seed(0)) * 20).to(dtype)
    assert divergence(row, row.clone()) == (0.0, True)


def test_what_a_model_rules_out_adds_nothing_and_what_only_one_rules_out_counts_a_lot() -> None:
    never = -math.inf
    kl, _ = divergence(torch.tensor([0.0, 0.0, never]), torch.tensor([0.0, 0.0, never]))
    assert kl == 0.0
    kl, _ = divergence(torch.tensor([0.0, 0.0]), torch.tensor([0.0, never]))
    assert math.isfinite(kl)
    assert kl > 100


def test_perplexity_is_the_geometric_mean_of_one_over_p() -> None:
    told = [log_probability(logits(0.5, 0.5), 0), log_probability(logits(0.125, 0.875), 0)]
    assert perplexity(told) == pytest.approx(4.0, rel=1e-6)  # sqrt(2 x 8)
    assert perplexity([]) is None


def of(
    answer: int,
    tokens: int,
    scored: int,
    kl: float | None,
    agreement: float | None,
    perplexity: float | None,
    saved_ms: float | None,
) -> Quality:
    return Quality(answer, tokens, scored, kl, kl, agreement, perplexity, saved_ms, changed=tokens, assignments=100)


def test_several_answers_are_weighed_by_their_tokens() -> None:
    assert together([]) is None
    both = together([of(1, 30, 10, 0.1, 1.0, 2.0, 4.0), of(2, 10, 30, 0.5, 0.5, 32.0, 8.0)])
    assert both is not None
    assert (both.answer, both.tokens, both.scored, both.changed, both.rate) == (2, 40, 40, 40, 0.2)
    assert both.kl == pytest.approx(0.4)
    assert both.kl_most == 0.5
    assert both.agreement == pytest.approx(0.625)
    assert both.perplexity == pytest.approx(4.0)  # (30 ln 2 + 10 ln 32) / 40 = 2 ln 2
    assert both.saved_ms == pytest.approx(5.0)
    lost = of(3, 5, 0, None, None, None, None)
    one = together([of(1, 30, 10, 0.1, 1.0, 2.0, 4.0), lost])
    assert one is not None
    assert (one.kl, one.agreement, one.saved_ms, one.tokens) == (pytest.approx(0.1), 1.0, 4.0, 35)
    assert one.perplexity == pytest.approx(2.0)
    nothing = together([lost])
    assert nothing is not None
    assert (nothing.kl, nothing.perplexity, nothing.saved_ms) == (None, None, None)
