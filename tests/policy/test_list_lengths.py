"""Lengths of buddy lists over coverage, against the lists themselves and against the definition, peer by peer."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.policy.substitute.buddies import cut, rank
from core.policy.substitute.list_lengths import ListRule, by_layer, conditional, lengths, percentiles
from core.settings.config import Settings
from tests.selection import examples


@dataclass(frozen=True)
class Known:
    pairs: npt.NDArray[np.float32] | None = None
    pairs_weighted: npt.NDArray[np.float32] | None = None
    likeness: None = None


def drawn(seed: int, layers: int, experts: int) -> npt.NDArray[np.float32]:
    """Co-activations with ties, and with experts that were never active."""
    rng = np.random.default_rng(seed)
    pairs = rng.integers(0, 3 if seed % 2 else 1000, (layers, experts, experts)).astype(np.float32)
    pairs[:, rng.random(experts) < 0.2] = 0.0
    return pairs


def one_by_one(row: list[float], alpha: float) -> int:
    """Peers to take, the largest first, until they cover alpha of the row's sum."""
    taken, upto, whole = 0, 0.0, sum(row)
    for value in sorted(row, reverse=True):
        if whole <= 0 or upto >= alpha - 1e-9:
            break
        taken, upto = taken + 1, upto + value / whole
    return taken


@examples(40)
@given(
    seed=st.integers(0, 2**32),
    experts=st.integers(1, 80),
    alphas=st.lists(st.floats(0.05, 1.0), min_size=1, max_size=4),
    most=st.integers(1, 64),
    smoothing=st.sampled_from([0.0, 0.5, 3.0]),
)
def test_lengths_are_those_of_the_lists_and_of_the_definition(
    seed: int, experts: int, alphas: list[float], most: int, smoothing: float
) -> None:
    pairs = drawn(seed, 2, experts)
    found = lengths(pairs, alphas, smoothing)
    for at, alpha in enumerate(alphas):
        lists = cut(rank(pairs, most), np.full(2, alpha), most, smoothing)
        np.testing.assert_array_equal(np.minimum(found[at], most), (lists.ids >= 0).sum(-1))
        for layer in range(2):
            for i in range(experts):
                row = [float(pairs[layer, i, j]) + smoothing for j in range(experts) if j != i]
                assert found[at, layer, i] == one_by_one(row, alpha)


def test_percentiles_are_of_the_experts_that_have_a_list() -> None:
    pairs = drawn(5, 2, 24)
    found = lengths(pairs, [0.3, 0.9])
    has = [[i for i in range(24) if found[1, layer, i]] for layer in range(2)]
    assert 0 < sum(map(len, has)) < 48
    expected = [
        [np.percentile([found[at, layer, i] for layer in range(2) for i in has[layer]], p) for at in range(2)]
        for p in (10, 50)
    ]
    assert percentiles(found, (10, 50)).tolist() == expected
    assert percentiles(np.zeros((2, 1, 3), np.int32), (50,)).tolist() == [[0.0, 0.0]]


def test_a_layer_may_have_an_alpha_of_its_own() -> None:
    pairs = drawn(4, 3, 20)
    own = lengths(pairs, np.array([[0.2, 0.5, 0.9]]))[0]
    for layer, alpha in enumerate((0.2, 0.5, 0.9)):
        np.testing.assert_array_equal(own[layer], lengths(pairs, [alpha])[0, layer])


def test_the_lists_of_a_layer_by_hand() -> None:
    """q of expert 0: .5, .3, .2; of 1: 1; of 2: .6, .4; expert 3 has no peer. At alpha .9 that is 3, 1, 2, 0."""
    pairs = np.array([[[9, 5, 3, 2], [7, 0, 0, 0], [6, 4, 0, 0], [0, 0, 0, 0]]], np.float32)
    assert lengths(pairs, [0.5, 0.9])[:, 0].tolist() == [[1, 1, 1, 0], [3, 1, 2, 0]]
    (found,) = by_layer(pairs, np.array([0.9]), 2)
    assert found[:5] == (0.9, 3, 1, 2.0, 3)
    assert found.limited == pytest.approx(1 / 3)
    assert found.covered == pytest.approx((0.8 + 1.0 + 1.0) / 3)
    (none,) = by_layer(np.zeros((1, 4, 4), np.float32), np.array([0.9]), 2)
    assert none == (0.9, 0, 0, 0.0, 0, 0.0, 0.0)


@pytest.mark.parametrize("smoothing", [0.0, 2.5])
def test_shares_are_of_each_expert_s_own_pairs(smoothing: float) -> None:
    pairs = drawn(6, 1, 12)[0]
    kept = pairs.copy()
    found = conditional(pairs, smoothing)
    for i in range(12):
        whole = sum(float(pairs[i, j]) + smoothing for j in range(12) if j != i)
        for j in range(12):
            expected = 0.0 if i == j or not whole else (float(pairs[i, j]) + smoothing) / whole
            assert found[i, j] == pytest.approx(expected)
    np.testing.assert_array_equal(pairs, kept)


def test_the_rule_is_what_is_set() -> None:
    rule = ListRule.of(Settings({"substitute.buddy.smoothing": 2.0}))
    assert rule == ListRule(False, 2.0)
    known = Known(drawn(0, 2, 4))
    assert rule.pairs(known) is known.pairs
    assert rule._replace(weighted=True).pairs(known) is None
