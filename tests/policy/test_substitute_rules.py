"""Which expert is computed in place of a missing one, by hand: each rule and gate in both implementations."""

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from core.errors import SettingError
from core.metrics.lossy_events import Action
from core.policy.substitute import Gates, batch, plain
from core.policy.substitute.buddies import cut, rank
from core.policy.substitute.list_lengths import ListRule, by_layer, conditional, lengths, percentiles
from core.settings.config import Settings
from tests.policy.substitutes import Known, ask, drawn, make, names
from tests.selection import examples

OPEN = Gates(rho=8)
SELECT = {"plain": plain.select, "batch": batch.select}
either = pytest.mark.parametrize("select", SELECT.values(), ids=SELECT)


def ladder(experts: int = 6) -> torch.Tensor:
    return torch.arange(float(experts)).expand(1, 4, experts)


@either
def test_what_is_under_way_is_left_alone_and_stands_in_for_nobody(select: Any) -> None:
    question = ask([[0, 1, 2, 3]], [[0.4, 0.3, 0.2, 0.1]], missing=[0], under_way=[1, 5], experts=6)
    found = select(question, OPEN, ladder())
    assert names(found)[:2] == ([[4, 1, 2, 3]], [["SUBSTITUTE", "EXACT", "EXACT", "EXACT"]]) and found.delta == 0.25


@either
def test_entropy_and_margin_of_the_gate(select: Any) -> None:
    """(4, 2, 1, 1) / 8: entropy 1/2*1 + 1/4*2 + 2*1/8*3 = 1.75 bits of log2(4) = 2: TAE 0.875; m = 4/8 - 2/8."""
    question = ask(
        [[0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 2, 3]],
        [[4.0, 2.0, 1.0, 1.0], [0.25] * 4, [1.0, 0.0, 0.0, 0.0]],
        missing=[0],
        experts=6,
    )
    scores = ladder().expand(3, 4, 6)
    assert select(question, OPEN, scores).tae.tolist() == pytest.approx([0.875, 1.0, 0.0])
    reasons = {0.875: ["TAE", "ALLOWED", "TAE"], 0.8749: ["ALLOWED", "ALLOWED", "TAE"], 1.0: ["TAE"] * 3}
    for tau, expected in reasons.items():
        assert [row[0] for row in names(select(question, replace(OPEN, tau=tau), scores))[2]] == expected
    reasons = {0.25: ["MARGIN", "ALLOWED", "MARGIN"], 0.2501: ["ALLOWED", "ALLOWED", "MARGIN"]}
    for margin, expected in reasons.items():
        assert [row[0] for row in names(select(question, replace(OPEN, margin=margin), scores))[2]] == expected


@either
def test_the_entropys_temperature(select: Any) -> None:
    """(16, 1) at T = 0.8: 16^1.25 = 32, so shares 32/33 and 1/33: log2(33) - 32/33 * 5 bits of log2(2) = 1."""
    question = ask([[0, 1]], [[16.0, 1.0]], missing=[0], experts=6)
    found = {t: float(select(question, replace(OPEN, temperature=t), None).tae) for t in (0.8, 1.0)}
    assert found == pytest.approx({0.8: math.log2(33) - 160 / 33, 1.0: math.log2(17) - 64 / 17}, abs=1e-6)
    assert found == pytest.approx({0.8: 0.19591, 1.0: 0.32276}, abs=1e-4)


@either
def test_delta_counts_distinct_experts_of_the_whole_batch(select: Any) -> None:
    """{0, 1, 2} are asked for, of which 1 and 2 are missing: delta = 2/3, and beta = 2/3 closes."""
    question = ask([[0, 1], [1, 2], [1, 0]], [[0.6, 0.4]] * 3, missing=[1, 2, 3], experts=6)
    scores = ladder().expand(3, 4, 6)[:, :2]
    assert select(question, OPEN, scores).delta == 2 / 3
    assert names(select(question, replace(OPEN, beta=2 / 3), scores))[2][1] == ["BETA", "BETA"]
    assert select(question, replace(OPEN, beta=0.67), scores).ids.tolist() == [[0, 5], [5, 4], [5, 0]]


@either
def test_dropping_what_carries_little(select: Any) -> None:
    question = ask([[0, 1, 2, 3]], [[4.0, 2.0, 1.0, 1.0]], missing=[0, 1, 2], experts=6)
    drop = replace(OPEN, order=("drop",), drop_share=0.25)
    assert names(select(question, drop, None)) == (
        [[0, -1, -1, 3]],
        [["WAIT", "DROP", "DROP", "EXACT"]],
        [["SHARE", "ALLOWED", "ALLOWED", "ALLOWED"]],
    )
    for order, reasons in (("lightest", ["RHO", "ALLOWED"]), ("heaviest", ["ALLOWED", "RHO"])):
        found = select(question, replace(drop, rho=1, rho_order=order), None)
        assert names(found)[2] == [["SHARE", *reasons, "ALLOWED"]]


@either
def test_the_first_option_that_is_allowed_is_taken(select: Any) -> None:
    question = ask([[0, 1, 2]], [[0.5, 0.3, 0.2]], missing=[0, 1, 2], experts=4)
    both = replace(OPEN, order=("substitute", "drop"), drop_share=0.25)
    assert names(select(question, both, ladder(4)[:, :3])) == (
        [[3, 1, -1]],
        [["SUBSTITUTE", "WAIT", "DROP"]],
        [["ALLOWED", "SHARE", "ALLOWED"]],
    )
    other = replace(both, order=("drop", "substitute"))
    assert names(select(question, other, ladder(4)[:, :3])) == (
        [[3, 1, -1]],
        [["SUBSTITUTE", "WAIT", "DROP"]],
        [["ALLOWED", "NO_CANDIDATE", "ALLOWED"]],
    )


@either
def test_gates_that_forbid_everything_change_nothing(select: Any) -> None:
    question, known, _ = drawn(5, 64, 12, 4)
    question.missing, question.ready = torch.arange(12) % 2 == 0, torch.arange(12) % 2 == 1
    shut = [
        replace(OPEN, tau=1.0),
        replace(OPEN, margin=0.0),
        replace(OPEN, beta=0.0),
        replace(OPEN, rho=0),
        replace(OPEN, protected=torch.ones(12, dtype=torch.bool)),
        replace(OPEN, order=()),
    ]
    for rules in shut:
        for order in (("substitute", "drop"),) if rules.order else ((),):
            found = select(question, replace(rules, order=order), make("buddy", known, 12))
            assert torch.equal(found.ids, question.ids) and int(found.action.max()) == Action.WAIT
    assert not torch.equal(select(question, OPEN, make("buddy", known, 12)).ids, question.ids)


@either
def test_masks_of_another_size_are_refused(select: Any) -> None:
    buddy = make("buddy", drawn(5, 4, 8, 4)[1], 8)
    with pytest.raises(SettingError, match=r"mask of missing experts has the shape \(6,\).* has 8 experts"):
        select(ask([[0, 1]], [[0.5, 0.5]], missing=[0], experts=6), OPEN, buddy)
    uneven = replace(ask([[0, 1]], [[0.5, 0.5]], missing=[0], experts=8), ready=torch.ones(6, dtype=torch.bool))
    with pytest.raises(SettingError, match="mask of ready experts"):
        select(uneven, OPEN, buddy)


def test_a_source_lists_what_a_profile_says() -> None:
    pairs = torch.zeros(2, 4, 4)
    pairs[1, 0] = torch.tensor([0.0, 1.0, 3.0, 2.0])
    buddy = make("buddy", Known(pairs.numpy()), 4, alpha="1")
    question = ask([[0]], [[1.0]], missing=[0], experts=4)
    assert list(buddy.listed(question, 0, 0, 0)) == [(2, 0.5), (3, pytest.approx(1 / 3)), (1, pytest.approx(1 / 6))]
    assert buddy.matrix(1)[0].tolist() == pytest.approx([0.0, 1 / 6, 0.5, 1 / 3])  # type: ignore[index]


@dataclass(frozen=True)
class Pairs:
    pairs: npt.NDArray[np.float32] | None = None
    pairs_weighted: npt.NDArray[np.float32] | None = None
    likeness: None = None


def co_activations(seed: int, layers: int, experts: int) -> npt.NDArray[np.float32]:
    """Co-activations with ties, and with experts that were never active."""
    rng = np.random.default_rng(seed)
    pairs = rng.integers(0, 3 if seed % 2 else 1000, (layers, experts, experts)).astype(np.float32)
    pairs[:, rng.random(experts) < 0.2] = 0.0
    return pairs


def one_by_one(row: list[float], alpha: float) -> int:
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
def test_lengths_by_definition(seed: int, experts: int, alphas: list[float], most: int, smoothing: float) -> None:
    pairs = co_activations(seed, 2, experts)
    found = lengths(pairs, alphas, smoothing)
    for at, alpha in enumerate(alphas):
        lists = cut(rank(pairs, most), np.full(2, alpha), most, smoothing)
        np.testing.assert_array_equal(np.minimum(found[at], most), (lists.ids >= 0).sum(-1))
        for layer in range(2):
            for i in range(experts):
                row = [float(pairs[layer, i, j]) + smoothing for j in range(experts) if j != i]
                assert found[at, layer, i] == one_by_one(row, alpha)


def test_percentiles_are_of_the_experts_that_have_a_list() -> None:
    pairs = co_activations(5, 2, 24)
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
    pairs = co_activations(4, 3, 20)
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
    pairs = co_activations(6, 1, 12)[0]
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
    known = Pairs(co_activations(0, 2, 4))
    assert rule.pairs(known) is known.pairs
    assert rule._replace(weighted=True).pairs(known) is None
