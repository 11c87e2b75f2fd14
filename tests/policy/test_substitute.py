"""Which expert is computed in place of a missing one: the batched choice against Algorithm 1 as written."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from core.metrics.lossy_events import Action, Why
from core.policy.substitute import Ask, Chosen, Gates, batch, plain
from tests.policy.substitutes import drawn, gates, make, names
from tests.selection import examples

CHOOSING = {
    "given": [{}],
    "similar": [{}],
    "router_ranked": [{}],
    "random": [{}],
    "predicted": [{}],
    "buddy": [
        {},
        {"eta": 1.0},
        {"alpha": "0.5", "k_max": 2},
        {"weighted": True, "k_max": 3, "eta": 2.5},
        {"smoothing": 1.0, "alpha": "1, 0.3"},
    ],
}
OPEN = Gates(rho=8)
SELECT = {"plain": plain.select, "batch": batch.select}


cases = st.tuples(st.integers(0, 2**32), st.integers(2, 12), st.integers(1, 8))


@pytest.mark.parametrize(("name", "params"), [(name, p) for name, all_ in CHOOSING.items() for p in all_])
@examples(40, fewer=8)
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
    free = replace(rules, rho=8)  # which of equals is taken may decide who finds none, and so whom rho is spent on
    assert_as_good(question, free, batch.select(question, free, source), batch.select(question, free, dense), dense)


def holds(question: Ask, rules: Gates, found: Chosen) -> None:
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
        assert len(set(taken)) == len(taken) and not set(taken) & set(was)


def assert_as_good(question: Ask, rules: Gates, one: Chosen, other: Chosen, dense: torch.Tensor) -> None:
    """Tokens whose first choice is equally good under both; later ones may follow from another of equals."""
    first = (question.missing[question.ids].cumsum(1) == 1) & question.missing[question.ids]
    both = first & (one.action == int(Action.SUBSTITUTE))
    assert torch.equal(both, first & (other.action == int(Action.SUBSTITUTE)))
    a, b = (dense.double().gather(2, c.ids.clamp_min(0)[..., None])[..., 0][both] for c in (one, other))
    torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-6)


@examples(200)
@given(case=cases)
def test_without_gates_it_is_algorithm_1_to_the_letter(case: tuple[int, int, int]) -> None:
    seed, experts, k = case
    question, known, _ = drawn(seed, 5, experts, min(k, experts))
    buddy = make("buddy", known, experts, alpha="1", k_max=3)
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
@examples(200)
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
        if rules.order == ("substitute",):
            for at in did:
                assert dense[token, at, found.ids[token, at]] >= dense[token, at, free.ids[token, at]]


@examples(200)
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
