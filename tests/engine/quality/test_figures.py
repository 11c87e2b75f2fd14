"""What a meter of quality computes: divergence, perplexity, an interval of a share, and which tokens are kept."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from core.engine.quality import sample
from core.engine.quality.figures import divergence, log_probability, perplexity
from core.engine.quality.interval import CLOSE, Z, margin, mean_error, share_of, surely_more
from core.engine.quality.report import Quality, together
from core.engine.quality.sample import GOLDEN, MOST_TOKENS, Sample
from tests.selection import examples


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
    assert (both.answer, both.tokens, both.scored, both.changed, both.assignments) == (2, 40, 40, 40, 200)
    assert both.kl == pytest.approx(0.4)
    assert both.kl_most == 0.5
    assert both.agreement == pytest.approx(0.625)
    assert both.perplexity == pytest.approx(4.0)  # (30 ln 2 + 10 ln 32) / 40 = 2 ln 2
    assert both.saved_ms == pytest.approx(5.0)
    lost = of(3, 5, 0, None, None, None, None)
    one = together([of(1, 30, 10, 0.1, 1.0, 2.0, 4.0), lost])
    assert (one.kl, one.agreement, one.saved_ms, one.tokens) == (pytest.approx(0.1), 1.0, 4.0, 35)
    assert one.perplexity == pytest.approx(2.0)
    nothing = together([lost])
    assert (nothing.kl, nothing.perplexity, nothing.saved_ms) == (None, None, None)


@pytest.mark.parametrize(  # by the formula of Brown, Cai and DasGupta 2001, (4), with z = 1.96
    ("hits", "n", "low", "high"),
    [(0, 10, 0.0, 0.2775), (2, 2, 0.3424, 1.0), (12, 24, 0.3143, 0.6857), (81, 263, 0.2553, 0.3662)],
)
def test_the_interval(hits: int, n: int, low: float, high: float) -> None:
    share = share_of(hits, n)
    assert (share.low, share.high) == pytest.approx((low, high), abs=5e-4)


@pytest.mark.parametrize("n", [1, 2, 24, 128, 2000])
def test_its_ends_are_where_the_share_is_z_standard_errors_away(n: int) -> None:
    for hits in {0, 1, n // 2, n - 1, n}:
        share = share_of(hits, n)
        assert 0 <= share.low <= share.value <= share.high <= 1
        for end in (share.low, share.high):
            if 0 < end < 1:
                assert abs(share.value - end) == pytest.approx(Z * math.sqrt(end * (1 - end) / n), abs=1e-9)


def test_no_tokens_say_nothing() -> None:
    assert share_of(0, 0) is None


@pytest.mark.parametrize(
    ("hits", "n", "verdict"),
    [
        (2, 2, "unclear"),
        (24, 24, "unclear"),
        (12, 24, "low"),
        (0, 2, "low"),
        (128, 128, "close"),
        (120, 128, "unclear"),
    ],
)
def test_nothing_is_said_that_the_interval_does_not_bear(hits: int, n: int, verdict: str) -> None:
    share = share_of(hits, n)
    assert share is not None and share.verdict == verdict
    assert (share.low >= CLOSE) == (verdict == "close") and (share.high < CLOSE) == (verdict == "low")


def test_a_gain_within_its_noise_is_none() -> None:
    mean, error = mean_error([1.0, 0.0, 2.0, -1.0])
    assert mean == 0.5 and error == pytest.approx(math.sqrt(5 / 3 / 4))
    assert not surely_more(mean, error)
    assert surely_more(*mean_error([1.0, 1.1, 0.9, 1.0]))
    assert not surely_more(*mean_error([5.0])), "one value has no known error"


def test_the_best_of_several_is_often_ahead_by_chance() -> None:
    """Ten that are alike: the best of them is called better hardly more often than one of two would be."""
    rng = np.random.default_rng(3)
    drawn = rng.normal(size=(2000, 10, 12))
    said = dict.fromkeys((1, 10), 0)
    for one in drawn:
        means = [mean_error(values) for values in one.tolist()]
        best = max(means)
        for of in said:
            said[of] += surely_more(*best, of)
    assert said[1] > 400 and said[10] < 250, said
    assert margin(1.0) == Z and margin(1.0, 10) > 2.8


def keep(tokens: int, rate: float, width: int = 3) -> dict[int, torch.Tensor]:
    kept = Sample()
    for token in range(tokens):
        kept.keep(token, torch.full((width,), float(token)), rate)
    return kept.finish()


@given(tokens=st.integers(0, 700), rate=st.sampled_from([0.0, 0.05, 0.1, 0.25, 0.5, 1.0]))
@examples(60)
def test_as_many_as_asked_for_evenly_spread_and_never_too_many(tokens: int, rate: float) -> None:
    rows = keep(tokens, rate)
    assert all((row == token).all() for token, row in rows.items())
    assert (0 in rows) == (tokens > 0 and rate > 0), "even the shortest answer is scored"
    bound = rate
    while sum(t * GOLDEN % 1.0 < bound for t in range(tokens)) > MOST_TOKENS:
        bound /= 2
    assert sorted(rows) == [t for t in range(tokens) if t * GOLDEN % 1.0 < bound]
    assert len(rows) <= MOST_TOKENS
    assert abs(len(rows) - bound * tokens) <= 3
    for low in range(0, tokens - 99, 50):  # any hundred in a row have their share
        assert abs(sum(low <= t < low + 100 for t in rows) - 100 * bound) <= 4


def test_a_long_answer_is_not_kept_at_its_beginning_only() -> None:
    rows = sorted(keep(5000, 1.0))
    assert MOST_TOKENS / 2 <= len(rows) <= MOST_TOKENS
    assert max(b - a for a, b in pairwise(rows)) <= 3 * 5000 / len(rows)


def test_wide_rows_are_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample, "MOST_BYTES", 1 << 16)
    width = sample.MOST_BYTES // 4 // 8 + 1  # seven fit
    rows = keep(40, 1.0, width)
    assert 1 <= len(rows) <= 7
    assert len(keep(9, 1.0, sample.MOST_BYTES)) == 1, "one that is too wide is kept all the same"


def test_what_is_kept_is_a_copy() -> None:
    kept, row = Sample(), torch.zeros(4)
    kept.keep(0, row, 1.0)
    row.fill_(9.0)
    assert kept.finish()[0].tolist() == [0.0] * 4
