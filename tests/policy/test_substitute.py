"""Which expert is computed in place of a missing one: Algorithm 1 and its gates, by hand and against each other."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core.choices import Action, Why
from core.errors import SettingError
from core.policy.substitute import Ask, Chosen, Gates, batch, plain
from tests.policy.substitutes import Known, ask, drawn, gates, make

CHOOSING = {
    "given": [{}],
    "similar": [{}],
    "router_ranked": [{}],
    "random": [{}],
    "predicted": [{}],
    "buddy": [
        {},
        {"eta": 1.0},
        {"alpha": "0.5", "search_rank": 2},
        {"weighted": True, "k_max": 3, "eta": 2.5},
        {"smoothing": 1.0, "alpha": "1, 0.3"},
    ],
}
OPEN = Gates(rho=8)
SELECT = {"plain": plain.select, "batch": batch.select}
either = pytest.mark.parametrize("select", SELECT.values(), ids=SELECT)


def names(found: Chosen) -> tuple[list[list[int]], list[list[str]], list[list[str]]]:
    return (
        found.ids.tolist(),
        [[Action(a).name for a in row] for row in found.action.tolist()],
        [[Why(w).name for w in row] for row in found.why.tolist()],
    )


# ---------------------------------------------------------------------- one against the other

cases = st.tuples(st.integers(0, 2**32), st.integers(2, 12), st.integers(1, 8))


@pytest.mark.parametrize(("name", "params"), [(name, p) for name, all_ in CHOOSING.items() for p in all_])
@settings(max_examples=40, deadline=None)
@given(case=cases)
def test_the_batch_chooses_as_algorithm_1_does(name: str, params: dict[str, Any], case: tuple[int, int, int]) -> None:
    """10 x 40 draws of gates, lists and residency, with 10 tokens each: 4,000 cases."""
    seed, experts, k = case
    k = min(k, experts)
    question, known, scores = drawn(seed, 10, experts, k)
    rules = gates(seed + 1, experts)
    source = torch.from_numpy(scores) if name == "given" else make(name, known, experts, **params)
    one, many = plain.select(question, rules, source), batch.select(question, rules, source)
    assert names(one) == names(many)
    assert one.delta == many.delta
    torch.testing.assert_close(one.tae, many.tae, atol=1e-6, rtol=0)
    holds(question, rules, many)
    dense = source if isinstance(source, torch.Tensor) else source.scores(question)
    assert dense.shape == (10, k, experts)
    if rules.unique:  # otherwise equal ones may stand in another order in a list than by id
        free = replace(rules, rho=8)  # which of equals is taken may decide who finds none, and so whom rho is spent on
        assert_as_good(question, free, batch.select(question, free, source), batch.select(question, free, dense), dense)


def holds(question: Ask, rules: Gates, found: Chosen) -> None:
    """What is true of every choice, whoever made it."""
    missing, ready = question.missing.tolist(), question.ready.tolist()
    for was, now, action, why in zip(question.ids.tolist(), *names(found), strict=True):
        changes = 0
        for old, new, done, reason in zip(was, now, action, why, strict=True):
            assert (done == "EXACT") == (not missing[old])
            assert (reason == "ALLOWED") == (done != "WAIT")
            if done in ("SUBSTITUTE", "DROP"):
                changes += 1
                assert not (rules.protected is not None and rules.protected[old])
                assert new == -1 if done == "DROP" else ready[new]
            else:
                assert new == old
        assert changes <= rules.rho
        taken = [new for new, done in zip(now, action, strict=True) if done == "SUBSTITUTE"]
        if rules.unique:
            assert len(set(taken)) == len(taken) and not set(taken) & set(was)


def assert_as_good(question: Ask, rules: Gates, one: Chosen, other: Chosen, dense: torch.Tensor) -> None:
    """Tokens whose first choice is equally good under both; later ones may follow from another of equals."""
    first = (question.missing[question.ids].cumsum(1) == 1) & question.missing[question.ids]
    both = first & (one.action == int(Action.SUBSTITUTE))
    assert torch.equal(both, first & (other.action == int(Action.SUBSTITUTE)))
    a, b = (dense.double().gather(2, c.ids.clamp_min(0)[..., None])[..., 0][both] for c in (one, other))
    torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-6)


@settings(max_examples=200, deadline=None)
@given(case=cases)
def test_without_gates_it_is_algorithm_1_to_the_letter(case: tuple[int, int, int]) -> None:
    seed, experts, k = case
    question, known, _ = drawn(seed, 5, experts, min(k, experts))
    buddy = make("buddy", known, experts, alpha="1", k_max=64, search_rank=3)
    lists, resident = buddy.lists.ids[1].tolist(), question.ready.tolist()  # type: ignore[attr-defined]
    expected = question.ids.tolist()
    for row in expected:
        used = set(row)
        for at, expert in enumerate(row):
            if question.missing[expert]:
                for rank in range(min(3, len(lists[expert]))):
                    candidate = lists[expert][rank]
                    if candidate >= 0 and resident[candidate] and candidate not in used:
                        row[at] = candidate
                        used.add(candidate)
                        break
    for select in SELECT.values():
        assert select(question, OPEN, buddy).ids.tolist() == expected


@pytest.mark.parametrize("order", ["lightest", "heaviest"])
@settings(max_examples=200, deadline=None)
@given(case=cases)
def test_rho_keeps_the_lightest_of_what_would_be_changed(order: Any, case: tuple[int, int, int]) -> None:
    """Of Algorithm 1's changes, and each kept one has a candidate that is as good, or better for what others left."""
    seed, experts, k = case
    question, known, _ = drawn(seed, 6, experts, min(k, experts))
    rules = replace(gates(seed + 1, experts), rho_order=order)
    buddy = make("buddy", known, experts, alpha="1")
    dense = buddy.scores(question).double()
    free, found = (plain.select(question, replace(rules, rho=rho), buddy) for rho in (8, rules.rho))
    for token, weights in enumerate(question.weights.tolist()):
        could = [at for at, action in enumerate(free.action[token].tolist()) if action >= Action.SUBSTITUTE]
        heaviest = sorted(could, key=lambda at: -weights[at])
        cut = min(rules.rho, len(could))
        kept = heaviest[:cut] if order == "heaviest" else heaviest[len(could) - cut :]
        did = [at for at, action in enumerate(found.action[token].tolist()) if action >= Action.SUBSTITUTE]
        assert did == sorted(kept)
        for at in set(could) - set(did):
            assert found.ids[token, at] == question.ids[token, at] and found.why[token, at] == Why.RHO
        if rules.unique and rules.order == ("substitute",):
            for at in did:
                assert dense[token, at, found.ids[token, at]] >= dense[token, at, free.ids[token, at]]


@settings(max_examples=200, deadline=None)
@given(case=cases)
def test_heaviest_first_is_one_walk_that_stops(case: tuple[int, int, int]) -> None:
    """Where a router's order is that of its weights: each takes what it finds, in order, until rho are replaced."""
    seed, experts, k = case
    question, known, _ = drawn(seed, 6, experts, min(k, experts))
    question.weights = question.weights.sort(1, descending=True).values
    rho = seed % 4
    buddy = make("buddy", known, experts, alpha="1")
    expected = question.ids.tolist()
    for token, row in enumerate(expected):
        used, left = set(row), rho
        for at, expert in enumerate(row):
            if question.missing[expert] and left:
                listed = buddy.listed(question, token, at, expert)
                found = [j for j, _ in listed if question.ready[j] and j not in used]
                if found:
                    row[at], left = found[0], left - 1
                    used.add(found[0])
    for select in SELECT.values():
        assert select(question, Gates(rho=rho, rho_order="heaviest"), buddy).ids.tolist() == expected


# ---------------------------------------------------------------------- by hand

ROW = [[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]]  # similar: the higher id is the better one


def ladder(experts: int = 6) -> torch.Tensor:
    """Scores [1, 4, E]: the higher the id the better."""
    return torch.arange(float(experts)).expand(1, 4, experts)


@either
def test_the_first_missing_expert_takes_the_best_and_the_next_one_the_next(select: Any) -> None:
    question = ask([[0, 1, 2, 3]], [[0.4, 0.3, 0.2, 0.1]], missing=[0, 2], experts=6)
    assert names(select(question, OPEN, ladder())) == (
        [[5, 1, 4, 3]],
        [["SUBSTITUTE", "EXACT", "SUBSTITUTE", "EXACT"]],
        [["ALLOWED"] * 4],
    )


@either
def test_rho_is_spent_on_the_lightest_or_on_the_heaviest(select: Any) -> None:
    """Who is allowed takes the best, which nobody else claims then. Of equals the router's first is heavier."""
    question = ask([[0, 1, 2, 3]], [[0.4, 0.2, 0.2, 0.2]], missing=[0, 1, 2], experts=8)
    light, heavy = (replace(OPEN, rho=1, rho_order=order) for order in ("lightest", "heaviest"))
    assert names(select(question, light, ladder(8))) == (
        [[0, 1, 7, 3]],
        [["WAIT", "WAIT", "SUBSTITUTE", "EXACT"]],
        [["RHO", "RHO", "ALLOWED", "ALLOWED"]],
    )
    assert names(select(question, heavy, ladder(8))) == (
        [[7, 1, 2, 3]],
        [["SUBSTITUTE", "WAIT", "WAIT", "EXACT"]],
        [["ALLOWED", "RHO", "RHO", "ALLOWED"]],
    )
    assert select(question, replace(light, rho=2), ladder(8)).ids.tolist() == [[0, 7, 6, 3]]
    assert select(question, replace(heavy, rho=2), ladder(8)).ids.tolist() == [[7, 6, 2, 3]]


@either
def test_what_is_under_way_is_left_alone_and_stands_in_for_nobody(select: Any) -> None:
    question = ask([[0, 1, 2, 3]], [[0.4, 0.3, 0.2, 0.1]], missing=[0], under_way=[1, 5], experts=6)
    found = select(question, OPEN, ladder())
    assert names(found)[:2] == ([[4, 1, 2, 3]], [["SUBSTITUTE", "EXACT", "EXACT", "EXACT"]]) and found.delta == 0.25


@either
def test_an_expert_may_be_taken_twice_when_that_is_allowed_at_a_discount(select: Any) -> None:
    question = ask([[0, 1]], [[0.5, 0.5]], missing=[0, 1], experts=6)
    scores = torch.tensor([[[0.0, 0.0, 0.1, 0.2, 0.5, 1.0]] * 2])
    for discount, second in ((1.0, 5), (0.6, 5), (0.5, 4), (0.1, 4)):  # 0.5 * 1.0 = 0.5: the lower id
        assert select(question, replace(OPEN, unique=False, discount=discount), scores).ids.tolist() == [[5, second]]
    assert select(question, OPEN, scores).ids.tolist() == [[5, 4]]


@either
def test_the_discount_also_holds_for_what_the_router_selected(select: Any) -> None:
    question = ask([[0, 5]], [[0.5, 0.5]], missing=[0], experts=6)
    scores = torch.tensor([[[0.0, 0.0, 0.1, 0.2, 0.5, 0.9]] * 2])
    assert select(question, replace(OPEN, unique=False), scores).ids.tolist() == [[5, 5]]
    assert select(question, replace(OPEN, unique=False, discount=0.5), scores).ids.tolist() == [[4, 5]]


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
def test_nothing_is_done_where_nothing_is_missing_or_nothing_is_ready(select: Any) -> None:
    known = drawn(5, 4, 8, 4)[1]
    for missing, action, reason in (([], "EXACT", "ALLOWED"), (range(8), "WAIT", "NO_CANDIDATE")):
        question = ask([[0, 1, 2, 3]], [[0.25] * 4], missing=list(missing), experts=8)
        found = select(question, OPEN, make("buddy", known, 8))
        assert names(found) == ([[0, 1, 2, 3]], [[action] * 4], [[reason] * 4])


@either
def test_masks_of_another_size_are_refused(select: Any) -> None:
    buddy = make("buddy", drawn(5, 4, 8, 4)[1], 8)
    with pytest.raises(SettingError, match=r"mask of missing experts has the shape \(6,\).* has 8 experts"):
        select(ask([[0, 1]], [[0.5, 0.5]], missing=[0], experts=6), OPEN, buddy)
    uneven = replace(ask([[0, 1]], [[0.5, 0.5]], missing=[0], experts=8), ready=torch.ones(6, dtype=torch.bool))
    with pytest.raises(SettingError, match="mask of ready experts"):
        select(uneven, OPEN, buddy)


def test_a_whole_prompt_in_one_call() -> None:
    question, known, _ = drawn(11, 512, 128, 8)
    rules = Gates(tau=0.3, rho=3)
    found = batch.select(question, rules, make("buddy", known, 128))
    assert found.ids.shape == (512, 8) and int((found.action == Action.SUBSTITUTE).sum()) > 500
    assert names(found) == names(plain.select(question, rules, make("buddy", known, 128)))


def test_a_source_lists_what_a_profile_says() -> None:
    pairs = torch.zeros(2, 4, 4)
    pairs[1, 0] = torch.tensor([0.0, 1.0, 3.0, 2.0])
    buddy = make("buddy", Known(pairs.numpy()), 4, alpha="1")
    question = ask([[0]], [[1.0]], missing=[0], experts=4)
    assert list(buddy.listed(question, 0, 0, 0)) == [(2, 0.5), (3, pytest.approx(1 / 3)), (1, pytest.approx(1 / 6))]
    assert buddy.matrix(1)[0].tolist() == pytest.approx([0.0, 1 / 6, 0.5, 1 / 3])  # type: ignore[index]
