"""What is counted from routing alone, against examples by hand and against counting one token at a time."""

from __future__ import annotations

import math

import numpy as np
import pytest

from core.policy.substitute.entropy import entropy
from core.profile.routing import Activations, Entropies, FirstTokens


def test_activations_by_hand() -> None:
    """Three tokens, four experts: {0,1} with weights .6/.2, {0,2} with .5/.5, {1,0} with .1/.3."""
    found = Activations(2, 4)
    found.add(1, np.array([[0, 1], [0, 2]]), np.array([[0.6, 0.2], [0.5, 0.5]]))
    found.add(1, np.array([[1, 0]]), np.array([[0.1, 0.3]]))
    assert found.counts.tolist() == [[0, 0, 0, 0], [3, 2, 1, 0]]
    both, weighted = found.pairs(), found.pairs_weighted()
    assert both[1].tolist() == [[0, 2, 1, 0], [2, 0, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]]
    assert weighted is not None
    # renormalised: (.75, .25), (.5, .5), (.25, .75): the smaller of 0 and 1 is .25 twice
    np.testing.assert_allclose(weighted[1], [[0, 0.5, 0.5, 0], [0.5, 0, 0, 0], [0.5, 0, 0, 0], [0, 0, 0, 0]])
    assert not both[0].any() and not weighted[0].any()


def test_activations_one_token_at_a_time() -> None:
    rng = np.random.default_rng(0)
    ids = rng.random((200, 16)).argsort(-1)[:, :4]
    ids[7, 3] = ids[7, 1]  # a token that has an expert twice uses it once
    weights = rng.random((200, 4)).astype(np.float32)
    found, wide = Activations(1, 16), np.zeros((16, 16))
    counts, both = np.zeros(16, int), np.zeros((16, 16))
    for part in np.array_split(np.arange(200), 7):
        found.add(0, ids[part].astype(np.uint8), weights[part])
    for row, w in zip(ids.tolist(), weights.astype(float), strict=True):
        gates = {}
        for expert, weight in zip(row, w, strict=True):
            gates.setdefault(expert, weight)
        for i, gi in gates.items():
            counts[i] += 1
            for j, gj in gates.items():
                both[i, j] += i != j
                wide[i, j] += (i != j) * min(gi, gj) / sum(gates.values())
    assert found.counts[0].tolist() == counts.tolist()
    np.testing.assert_array_equal(found.pairs()[0], both)
    weighted = found.pairs_weighted()
    assert weighted is not None
    np.testing.assert_allclose(weighted[0], wide, rtol=1e-5)


def test_first_tokens_count_less_in_pairs_only() -> None:
    found = Activations(1, 3)
    found.add(0, np.array([[0, 1], [0, 2]]), np.array([[0.5, 0.5]] * 2), np.array([0.25, 1.0]))
    assert found.counts[0].tolist() == [2, 1, 1]
    weighted = found.pairs_weighted()
    assert weighted is not None
    assert found.pairs()[0, 0].tolist() == [0, 0.25, 1] and weighted[0, 0].tolist() == [0, 0.125, 0.5]


def test_without_weights_nothing_is_said_of_them() -> None:
    found = Activations(1, 4)
    found.add(0, np.array([[0, 1]]))
    assert found.pairs_weighted() is None and found.pairs()[0, 0, 1] == 1


def test_entropy_by_hand() -> None:
    """-sum g log g / log k: all equal 1, one alone 0, and .75/.25 gives .8113 of a bit."""
    weights = np.array([[0.5, 0.5], [1.0, 0.0], [0.3, 0.1], [0.9, 0.3]])
    bits = -(0.75 * math.log2(0.75) + 0.25 * math.log2(0.25))
    np.testing.assert_allclose(entropy(weights), [1, 0, bits, bits])
    assert bits == pytest.approx(0.8112781)
    assert entropy(np.ones((3, 1))).tolist() == [0, 0, 0]  # of one expert there is nothing to choose


def test_percentiles_are_those_of_the_sorted_values() -> None:
    rng = np.random.default_rng(1)
    weights = rng.dirichlet([0.6] * 4, (2, 777))
    found = Entropies(2)
    assert found.percentiles() is None
    for part in np.array_split(np.arange(777), 5):
        for layer in range(2):
            found.add(layer, weights[layer, part])
    got = found.percentiles()
    assert got is not None and got.shape == (2, 101) and got.dtype == np.float32
    for layer in range(2):
        exact = np.percentile(entropy(weights[layer]), np.arange(101), method="inverted_cdf")
        np.testing.assert_allclose(got[layer], exact, atol=1 / (1 << 14))


def test_first_table_by_hand() -> None:
    found = FirstTokens(6, 2)
    assert found.table() is None
    found.add(np.array([7, 7, 3]), np.array([[0, 5], [5, 2], [4, 1]], np.uint8))
    found.add(np.array([7, 9]), np.array([[2, 0], [1, 1]], np.uint8))
    table = found.table()
    assert table is not None
    assert table.tokens.tolist() == [3, 7, 9] and table.tokens.dtype == np.int32
    # of token 7: 0, 2 and 5 twice each, the lower ids first; of 3: 1 and 4 once; of 9: only expert 1
    assert table.experts.tolist() == [[1, 4], [0, 2], [1, -1]] and table.experts.dtype == np.int16
