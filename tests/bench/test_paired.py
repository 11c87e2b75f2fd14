"""Intervals of paired differences hold the true difference as often as they say."""

from statistics import fmean

import numpy as np
import pytest

from bench.harness.paired import CONFIDENCE, difference, pseudo_values, ratios, stretches, student
from tests.selection import layered

TRIALS = 1000


def drifting(random: np.random.Generator, tokens: int) -> np.ndarray:
    """Noise [tokens] whose neighbours are alike (AR(1), correlation .6)."""
    noise = random.normal(size=tokens)
    for at in range(1, tokens):
        noise[at] += 0.6 * noise[at - 1]
    return noise


@pytest.mark.parametrize("blocks", layered([3, 5, 20], quick=lambda blocks: blocks == 5))
def test_rounds_hold_a_known_difference_as_often_as_they_say(blocks: int) -> None:
    """Both sides share what the machine did in a round, which is ten times their own noise."""
    random, held = np.random.default_rng(blocks), 0
    for _ in range(TRIALS):
        machine = random.normal(0, 10, blocks)
        found = difference(list(machine + random.normal(2, 1, blocks)), list(machine + random.normal(0, 1, blocks)))
        assert found is not None
        held += found.low <= 2 <= found.high
    assert held / TRIALS == pytest.approx(CONFIDENCE, abs=0.02)


@pytest.mark.long(0.1)
def test_stretches_of_tokens_hold_it_where_tokens_alone_would_not() -> None:
    random, held, alone = np.random.default_rng(1), 0, 0
    for _ in range(150):
        some, others = 1 + drifting(random, 480), drifting(random, 480)
        for values, blocks in ((stretches(list(some)), stretches(list(others))), (list(some), list(others))):
            found = difference(values, blocks)
            assert found is not None
            inside = found.low <= 1 <= found.high
            held, alone = held + (inside and len(values) == 30), alone + (inside and len(values) == 480)
    assert held / 150 >= 0.9 and alone / 150 < 0.8


def test_a_ratio_of_sums_holds_it_with_blocks_of_unequal_size() -> None:
    """Hit rates .7 and .6 of the same requests, of which a block has 4 to 60."""
    random, held = np.random.default_rng(2), 0
    for _ in range(400):
        asked = random.integers(4, 60, 24)
        some, others = (ratios(random.binomial(asked, rate), asked) for rate in (0.7, 0.6))
        found = difference(some, others)
        assert found is not None
        held += found.low <= 0.1 <= found.high
    assert held / 400 == pytest.approx(CONFIDENCE, abs=0.035)
    assert fmean(ratios([1, 3], [4, 4])) == pytest.approx(0.5)


@pytest.mark.long(0.1)
def test_several_comparisons_are_right_together() -> None:
    """Twelve differences of nothing: with one interval each 46 of 100 answers would name one, together 5."""
    random, alone, together = np.random.default_rng(3), 0, 0
    for _ in range(150):
        drawn = [difference(list(random.normal(size=6)), 0.0, count) for count in (1, 12) for _ in range(12)]
        apart = [one is not None and abs(one.mean) > one.half for one in drawn]
        alone, together = alone + any(apart[:12]), together + any(apart[12:])
    assert alone / 150 > 0.3 and together / 150 < 0.1


def test_there_is_no_interval_without_enough_blocks_of_the_same_things() -> None:
    assert difference([1.0, 2.0], [0.0, 0.0]) is None and difference([1.0, 2.0, 3.0], [1.0, 2.0]) is None
    same = difference([2.0, 2.0, 2.0], [1.0, 1.0, 1.0])
    assert same is not None and (same.low, same.high, same.blocks) == (1.0, 1.0, 3)


def test_pseudo_values_of_a_mean_are_its_blocks_and_students_t_is_the_table() -> None:
    values = [1.0, 4.0, 2.0, 9.0]
    assert pseudo_values(values, fmean) == pytest.approx(values) and pseudo_values(values[:1], fmean) == []
    found = [student(freedom, 0.95) for freedom in (1, 2, 3, 4, 10, 30)]
    assert found == pytest.approx([12.7062, 4.3027, 3.1824, 2.7764, 2.2281, 2.0423], abs=1e-4)
    assert student(5, 0.99) == pytest.approx(4.0321, abs=1e-4)
