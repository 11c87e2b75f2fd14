"""Which expert is computed in place of a missing one, by hand: each rule and gate in both implementations."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from core.errors import SettingError
from core.metrics.lossy_events import Action
from core.policy.substitute import Gates, batch, plain
from tests.policy.substitutes import Known, ask, drawn, make, names

OPEN = Gates(rho=8)
SELECT = {"plain": plain.select, "batch": batch.select}
either = pytest.mark.parametrize("select", SELECT.values(), ids=SELECT)
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
def test_no_expert_is_taken_twice(select: Any) -> None:
    scores = torch.tensor([[[0.0, 0.0, 0.1, 0.2, 0.5, 1.0]] * 2])
    both = ask([[0, 1]], [[0.5, 0.5]], missing=[0, 1], experts=6)
    assert select(both, OPEN, scores).ids.tolist() == [[5, 4]]
    selected = ask([[0, 5]], [[0.5, 0.5]], missing=[0], experts=6)
    assert select(selected, OPEN, scores).ids.tolist() == [[4, 5]], "nor one that the router selected"


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
