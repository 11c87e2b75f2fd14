"""What may be said of a share of some tokens: Wilson's interval, and the verdict that follows from it."""

from __future__ import annotations

import math

import numpy as np
import pytest

from core.engine.quality.interval import CLOSE, Z, margin, mean_error, share_of, surely_more


@pytest.mark.parametrize(  # by the formula of Brown, Cai and DasGupta 2001, (4), with z = 1.96
    ("hits", "n", "low", "high"),
    [(0, 10, 0.0, 0.2775), (2, 2, 0.3424, 1.0), (12, 24, 0.3143, 0.6857), (81, 263, 0.2553, 0.3662)],
)
def test_the_interval(hits: int, n: int, low: float, high: float) -> None:
    share = share_of(hits, n)
    assert share is not None
    assert (share.low, share.high) == pytest.approx((low, high), abs=5e-4)


@pytest.mark.parametrize("n", [1, 2, 24, 128, 2000])
def test_its_ends_are_where_the_share_is_z_standard_errors_away(n: int) -> None:
    for hits in {0, 1, n // 2, n - 1, n}:
        share = share_of(hits, n)
        assert share is not None
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
