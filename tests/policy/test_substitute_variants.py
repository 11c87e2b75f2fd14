"""Substitutes one by one: buddy lists by hand, and what each of the others would take."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from core.errors import ProfileError, SettingError
from core.metrics.lossy_events import Action, Why
from core.policy.substitute import Ask, Chosen, Gates, Substitute, batch, plain
from core.policy.substitute.buddies import Lists, alpha_of, alphas, cut, rank, spread
from core.settings.registry import NEEDS_PROFILE, create, variant, variants
from tests.policy.substitutes import CPU, Known, ask, drawn, gates, make
from tests.selection import examples

OPEN = Gates(rho=8)
M = np.zeros((1, 5, 5), np.float32)
M[0, 0] = [9, 5, 3, 1, 1]  # q(.|0) = 5/10, 3/10, 1/10, 1/10; the diagonal counts for nothing
M[0, 1] = [5, 0, 0, 0, 0]  # 2, 3 and 4 were never chosen together with 1


def lists(alpha: float = 0.95, most: int = 16, smoothing: float = 0.0) -> Lists:
    return cut(rank(M), np.array([alpha]), most, smoothing)


def test_alpha_may_be_one_number_a_layer() -> None:
    pairs = np.repeat(M, 2, 0)
    found = cut(rank(pairs), alpha_of(alphas("0.5, 1"), 2))
    assert [(found.ids[layer, 0] >= 0).sum() for layer in range(2)] == [1, 4]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("0.04", "between 0.05 and 1, not 0.04"),
        ("1.01", "not 1.01"),
        ("0.9, nan", "not nan"),
        ("much", "'much' is not a number"),
        (" , ", "alpha is empty"),
    ],
)
def test_what_alpha_cannot_be(text: str, said: str) -> None:
    with pytest.raises(SettingError, match=said):
        create("substitute", "buddy", {"alpha": text})


def test_alpha_of_another_number_of_layers() -> None:
    with pytest.raises(SettingError, match=r"alpha has 3 numbers, but this model has 2 layers"):
        make("buddy", Known(np.repeat(M, 2, 0)), 5, alpha="1, 0.5, 1")


@examples(60)
@given(
    seed=st.integers(0, 2**32),
    experts=st.integers(2, 90),
    alpha=st.floats(0.05, 1.0),
    most=st.integers(1, 64),
    smoothing=st.sampled_from([0.0, 0.5, 3.0]),
)
def test_cut_lists_are_as_defined(seed: int, experts: int, alpha: float, most: int, smoothing: float) -> None:
    """BuddyMoE equations 4 to 6, expert by expert; and lists that went through a file are the same."""
    rng = np.random.default_rng(seed)
    pairs = rng.integers(0, 3 if seed % 2 else 1000, (1, experts, experts)).astype(np.float32)
    found = cut(rank(pairs), np.array([alpha]), most, smoothing)
    for i in range(experts):
        q = [0.0 if j == i else float(pairs[0, i, j]) + smoothing for j in range(experts)]
        whole, upto, expected = sum(q), 0.0, list[int]()
        for j in sorted((j for j in range(experts) if j != i), key=lambda j: (-q[j], j))[:most]:
            if whole > 0 and upto < alpha - 1e-9:
                expected.append(j)
                upto += q[j] / whole
        assert [j for j in found.ids[0, i].tolist() if j >= 0] == expected
        assert found.q[0, i, : len(expected)].tolist() == pytest.approx([q[j] / whole for j in expected])
    again = cut(rank(spread(rank(pairs))), np.array([alpha]), most, smoothing)
    np.testing.assert_array_equal(again.ids, found.ids)
    np.testing.assert_allclose(again.q, found.q, rtol=1e-5)


def taken(substitute: Substitute, question: Ask, rules: Gates = OPEN) -> list[list[int]]:
    one, many = plain.select(question, rules, substitute), batch.select(question, rules, substitute)
    assert one.ids.tolist() == many.ids.tolist()
    return one.ids.tolist()


def test_psi_weighs_how_often_against_what_the_token_wants() -> None:
    """q = .5 and .3 for experts 1 and 2; zhat of logits (1, -1, 3, 0, 0) = 0 and 1. eta = 1: .5 against .3 * 2 = .6;
    eta = .5: .5 against .45."""
    known = Known(np.repeat(M, 2, 0), np.repeat(M[:, :, [0, 2, 1, 3, 4]], 2, 0))
    question = ask([[0]], [[1.0]], missing=[0], experts=5, logits=[[1.0, -1.0, 3.0, 0.0, 0.0]])
    assert taken(make("buddy", known, 5), question) == [[1]]
    assert taken(make("buddy", known, 5, eta=1.0), question) == [[2]]
    assert taken(make("buddy", known, 5, eta=0.5), question) == [[1]]
    assert taken(make("buddy", known, 5, weighted=True), question) == [[2]]
    assert [make("buddy", known, 5, eta=eta).logits for eta in (0.0, 0.1)] == [False, True]


def test_only_the_first_buddies_are_looked_at() -> None:
    question = ask([[0]], [[1.0]], missing=[0, 1, 2], experts=5)
    for params, expected in (({}, 3), ({"k_max": 3}, 3), ({"k_max": 2}, 0), ({"alpha": "0.8"}, 0)):
        assert taken(make("buddy", Known(np.repeat(M, 2, 0)), 5, **params), question) == [[expected]]


def test_the_most_alike_the_next_best_and_the_one_that_was_named() -> None:
    likeness = np.zeros((2, 5, 5), np.float16)
    likeness[1, 0] = [1.0, -0.5, 0.2, 0.1, 0.2]
    question = ask(
        [[0]], [[1.0]], missing=[0], experts=5, logits=[[3.0, 0.0, -1.0, 2.0, 1.0]], named=[0.9, 0.0, 0.1, 0.2, 0.4]
    )
    assert taken(make("similar", Known(likeness=likeness), 5), question) == [[2]]
    matrix = make("similar", Known(likeness=likeness), 5).matrix(1)
    assert matrix is not None and matrix[0].tolist() == pytest.approx([0.0, 0.25, 0.6, 0.55, 0.6], abs=1e-3)
    assert taken(make("router_ranked", experts=5), question) == [[3]]
    assert taken(make("predicted", experts=5), question) == [[4]]
    question.named = torch.zeros(5)
    assert taken(make("predicted", experts=5), question) == [[0]]  # nothing was named: it is waited for
    question.named = None
    assert taken(make("predicted", experts=5), question) == [[0]]


def test_random_is_fair_and_the_same_again() -> None:
    weights = torch.linspace(0.1, 0.9, 4000)
    ids = torch.zeros(4000, 1, dtype=torch.int64)
    lost, ready = torch.arange(8) == 0, torch.arange(8) > 2
    questions = [Ask(layer, ids, weights[:, None], lost, ready) for layer in (1, 2)]
    first, other = (batch.select(question, OPEN, make("random")).ids for question in questions)
    assert torch.equal(first, batch.select(questions[0], OPEN, make("random")).ids)
    assert (first == other).float().mean() < 0.3
    counts = torch.bincount(first[:, 0], minlength=8)
    assert counts[:3].tolist() == [0, 0, 0] and counts[3:].min() > 700 and counts[3:].max() < 900  # 800 each
    moved = Ask(1, ids[100:], weights[100:, None], lost, ready)
    assert torch.equal(batch.select(moved, OPEN, make("random")).ids, first[100:])  # whatever the batch is


def lean(question: Ask, rules: Gates, share: float) -> Chosen:
    """Cache-prior routing by its definition, token by token; no logit is there twice."""
    logits, k = question.logits.double(), question.ids.shape[1]
    span = share * (logits.amax(1) - logits.amin(1))
    shut = batch.select(
        question, Gates(tau=rules.tau, margin=rules.margin, beta=rules.beta, rho=99, order=()), None
    ).why
    ids = question.ids.clone()
    for t, row in enumerate(question.ids.tolist()):
        held = [e for e in row if not question.missing[e]]
        if rules.protected is not None:
            held += [e for e in row if question.missing[e] and rules.protected[e]]
        bonus = [float(logits[t, e] + span[t] * (question.ready[e])) for e in range(len(logits[t]))]
        open_ = [e for e in range(len(bonus)) if e not in held and (question.ready[e] or e in row)]
        new = held + sorted(open_, key=lambda e: -bonus[e])[: k - len(held)]
        came, went = [e for e in new if e not in row], [e for e in row if e not in new]
        if not shut[t].any() and len(came) <= rules.rho:
            for old, fresh in zip(went, came, strict=True):
                ids[t, row.index(old)] = fresh
    return plain.select(question, rules, None)._replace(ids=ids)


@examples(150)
@given(seed=st.integers(0, 2**32), experts=st.integers(3, 12), share=st.sampled_from([0.0, 0.0997, 0.4871, 0.9713]))
def test_leaning_towards_the_cache_is_a_top_k_with_a_bonus(seed: int, experts: int, share: float) -> None:
    question, _, _ = drawn(seed, 8, experts, 2)
    rng = np.random.default_rng(seed)
    question.logits = torch.from_numpy(rng.permuted(np.tile(np.arange(experts), (8, 1)), axis=1)).float() + 0.015625
    question.logits[:, 0] += 0.25
    question.weights, question.ids = question.logits.softmax(-1).topk(2)
    rules = gates(seed + 1, experts)
    rules = Gates(tau=rules.tau, margin=rules.margin, beta=rules.beta, rho=rules.rho, protected=rules.protected)
    found = plain.select(question, rules, make("cache_prior", experts=experts, lean=share))
    expected = lean(question, rules, share)
    assert [sorted(row) for row in found.ids.tolist()] == [sorted(row) for row in expected.ids.tolist()]
    moved = found.action == int(Action.SUBSTITUTE)
    assert torch.equal(moved, found.ids != question.ids)
    assert int(moved.sum(1).max()) <= rules.rho and bool(question.ready[found.ids[moved]].all())
    waits = found.action == int(Action.WAIT)
    assert torch.equal(moved | waits, question.missing[question.ids])
    assert torch.equal(found.why != int(Why.ALLOWED), waits)
    if share == 0:
        assert not moved.any()


def test_leaning_takes_the_routers_weights_for_what_it_chose() -> None:
    """Logits 4, 3, 2, 0: with 0.3 * 4 = 1.2 more, 2 (resident) beats 1 (missing)."""
    question = ask(
        [[0, 1], [0, 1]],
        [[0.7, 0.3], [0.7, 0.3]],
        missing=[1],
        experts=4,
        logits=[[4.0, 3.0, 2.0, 0.0], [4.0, 3.5, 2.0, 0.0]],
    )
    question.weigh = lambda ids: ids.float() / 10
    found = batch.select(question, OPEN, make("cache_prior", experts=4, lean=0.3))
    assert found.ids.tolist() == [[0, 2], [0, 1]] and found.weights is not None
    assert found.weights.tolist() == [pytest.approx([0.0, 0.2]), pytest.approx([0.7, 0.3])]
    dropped = batch.select(question, Gates(order=("substitute", "drop")), make("cache_prior", experts=4, lean=0.3))
    assert dropped.ids.tolist() == [[0, 2], [0, -1]]


def test_what_needs_a_profile_says_so() -> None:
    assert [v.name for v in variants("substitute") if v.needs] == ["buddy", "similar"]
    assert variant("substitute", "buddy").help.endswith(NEEDS_PROFILE)
    for name, known in (("buddy", None), ("buddy", Known()), ("similar", None), ("similar", Known())):
        with pytest.raises(ProfileError, match=r"launch\.py calibrate, or open the Calibrate tab"):
            make(name, known)
    with pytest.raises(ProfileError, match="chosen together with weights"):
        make("buddy", Known(np.repeat(M, 2, 0)), 5, weighted=True)


@pytest.mark.parametrize("name", [v.name for v in variants("substitute")])
def test_every_parameter_does_something(name: str) -> None:
    other: dict[str, Any] = {"alpha": "0.3", "k_max": 1, "weighted": True, "smoothing": 100.0, "eta": 5.0, "lean": 0.9}
    for param in variant("substitute", name).params:
        base = {"alpha": "0.5"} if param.name == "smoothing" else {}
        assert any(
            answer(name, seed, base) != answer(name, seed, {**base, param.name: other[param.name]})
            for seed in range(40)
        ), param.name


def answer(name: str, seed: int, params: dict[str, Any]) -> list[list[int]]:
    question, known, _ = drawn(seed, 6, 10, 4)
    made = make(name, known, 10, **params)
    return batch.select(question, Gates(rho=8), made).ids.tolist()


def test_tables_on_the_cpu_cost_no_device_memory() -> None:
    assert make("buddy", drawn(0, 2, 8, 2)[1]).bytes == 0 and CPU.type == "cpu"
