"""Super experts by hand: which outliers are found, and which are none."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from core.policy.substitute.super_experts import mask, outstanding, super_experts

L, E = 8, 64  # of which the first six layers are looked at


def ordinary(seed: int = 0) -> npt.NDArray[np.float32]:
    """Largest outputs that differ by a factor of two at most."""
    return np.random.default_rng(seed).uniform(1, 2, (L, E)).astype(np.float32)


def test_outliers_are_found_the_largest_first() -> None:
    peaks = ordinary()
    peaks[1, 60], peaks[2, 5] = 300, 900
    found = super_experts(peaks)
    assert [(one.layer, one.expert) for one in found] == [(2, 5), (1, 60)]
    assert found[0].peak == 900 and found[0].ratio == pytest.approx(900 / np.median(peaks[2]))
    assert np.argwhere(mask(peaks)).tolist() == [[1, 60], [2, 5]]


def test_where_nothing_stands_out_none_is_super() -> None:
    """Although something is above every percentile, and above a tenth of the largest."""
    peaks = ordinary()
    assert super_experts(peaks) == [] and not mask(peaks).any()
    assert len(super_experts(peaks, outlying=0.0)) == 2
    most = outstanding(peaks)
    ratios = peaks[:6] / np.median(peaks[:6], 1, keepdims=True)
    assert most is not None and most.ratio == pytest.approx(ratios.max())
    assert ratios[most.layer, most.expert] == ratios.max()


@pytest.mark.parametrize(("size", "found"), [(99.0, False), (101.0, True)])
def test_a_tenth_of_the_largest_is_asked_of_it(size: float, found: bool) -> None:
    peaks = ordinary()
    peaks[0, 0], peaks[1, 1] = 1000, size
    assert mask(peaks)[0, 0] and bool(mask(peaks)[1, 1]) is found


def test_no_more_than_one_in_two_hundred() -> None:
    """Six layers of 64 are 384: two are above the 99.5th percentile."""
    peaks = ordinary()
    peaks[3, :20] = np.arange(100, 120)
    assert [(one.layer, one.expert) for one in super_experts(peaks)] == [(3, 19), (3, 18)]


def test_the_last_quarter_of_the_layers_is_left_out() -> None:
    """Their outputs are large, too: they take massive activations away again."""
    peaks = ordinary()
    peaks[6:] *= 1000
    peaks[7, 7] = 1e6
    assert super_experts(peaks) == []
    peaks[5, 1] = 50  # is not held against the last layers' outputs
    assert [(one.layer, one.expert) for one in super_experts(peaks)] == [(5, 1)]


def test_a_layer_with_larger_outputs_has_none_for_that() -> None:
    peaks = ordinary()
    peaks[4] *= 100
    assert super_experts(peaks) == []


def test_experts_that_were_never_chosen_count_nothing() -> None:
    peaks = np.zeros((L, E), np.float32)
    assert super_experts(peaks) == [] and outstanding(peaks) is None and not mask(peaks).any()
    peaks[2, :8] = 1
    peaks[2, 3] = 40
    assert [(one.layer, one.expert, one.ratio) for one in super_experts(peaks)] == [(2, 3, 40.0)]
    peaks[:] = 0
    peaks[2, 3] = 40  # with nobody beside it
    assert super_experts(peaks) == []


def test_a_single_layer_is_looked_at() -> None:
    peaks = ordinary()[:1]
    peaks[0, 9] = 70
    assert [(one.layer, one.expert) for one in super_experts(peaks)] == [(0, 9)]
