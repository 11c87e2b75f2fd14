"""Prefetching goes on only where tokens are surely faster with it, by blocks of both; and is compared again."""

import random

import numpy as np
import pytest

from core.policy.comparison import BLOCK, FUTILE, LEAD, LEARNING, MOST, Comparison
from core.policy.comparison import FEWEST as FEW
from core.policy.throttle import CLEAR, LONGEST, REST, Throttle
from core.policy.throttle import FEW as SHOWN
from core.types import StepRecord

FEWEST = LEAD + BLOCK + LEAD + LEARNING + FEW  # tokens of a block of the usual way, and the fewest of the other


def step(
    total_ms: float, phase: str = "decode", tokens: int = 1, waited: float = 0.5, predict_ms: float = 0.0
) -> StepRecord:
    """`waited`: the share of its time that it waited for copies."""
    none = np.zeros(0, np.int16)
    times = 0.0, total_ms, 1.0, waited * total_ms, 0.0, 0.0
    arrays = none, none, none, none.astype(np.uint8)
    return StepRecord(0, phase, tokens, *times, *arrays, predict_ms=predict_ms)  # type: ignore[arg-type]


def compared(usual: float, other: float, noise: float, seed: int) -> tuple[Comparison, int]:
    """A comparison of ways that take so long, with log-normal noise, and the tokens that it took."""
    one, draw, tokens = Comparison(), random.Random(seed), 0
    while one.result is None:
        tokens += 1
        one.note((other if one.other else usual) * draw.lognormvariate(0.0, noise))
    return one, tokens


def throttle() -> tuple[Throttle, list[str]]:
    one, said = Throttle(), list[str]()
    one.enabled, one.say = True, said.append
    return one, said


def feed(one: Throttle, count: int, without: float = 10.0, with_it: float = 10.0) -> list[bool]:
    """Whether each of some tokens was computed while prefetching was paused."""
    paused = []
    for i in range(count):
        paused.append(one.paused)
        one.note(step((without if one.paused else with_it) * (1 + 1e-3 * (i % 2))))
    return paused


@pytest.mark.parametrize(("usual", "other"), [(10.0, 20.0), (20.0, 10.0)])
def test_a_large_difference_is_seen_after_few_tokens_of_the_other_way(usual: float, other: float) -> None:
    one, tokens = compared(usual, other, 0.05, 1)
    result = one.result
    assert tokens == FEWEST and result is not None and result.faster is (other < usual)
    assert result.usual_ms == pytest.approx(usual, rel=0.1) and result.other_ms == pytest.approx(other, rel=0.1)
    assert result.tokens == FEW and not one.other, "the usual way until somebody decides"


def test_ways_take_turns_and_their_first_tokens_do_not_count() -> None:
    one, order = Comparison(), []
    for _ in range(4 * (LEAD + BLOCK) + LEARNING):
        order.append(one.other)
        early = len(order) in (1, 2) or order[-2:] == [False, True] or order[-2:] == [True, False]
        one.note(1e9 if early else (9.9 if order[-1] else 10.0) + len(order) % 2)  # a little ahead, and not surely
    assert order.count(False) == 2 * (LEAD + BLOCK) and order.count(True) == 2 * (LEAD + BLOCK) + LEARNING
    assert [a for a, b in zip(order, [None, *order], strict=False) if a != b] == [False, True, False]
    assert one.result is None


def test_equal_ways_are_rarely_told_apart_and_those_that_differ_by_twice_the_noise_of_a_token_nearly_always() -> None:
    same = [compared(10.0, 10.0, 0.15, seed)[0].result for seed in range(200)]
    assert sum(one is not None and one.faster is not None for one in same) <= 10
    slower = [compared(10.0, 13.0, 0.15, seed)[0].result for seed in range(100)]
    assert all(one is not None and one.faster is not True for one in slower)
    assert sum(one is not None and one.faster is False for one in slower) >= 90, "or it was no longer ahead"
    faster = [compared(13.0, 10.0, 0.15, seed)[0].result for seed in range(100)]
    assert sum(one is not None and one.faster is True for one in faster) >= 99


def test_a_way_that_is_not_ahead_after_two_blocks_is_left() -> None:
    tokens = [compared(10.0, 10.0, 0.15, seed)[1] for seed in range(200)]
    early = FUTILE * (LEAD + BLOCK) + LEARNING
    assert sum(count <= early for count in tokens) > 80 and max(tokens) == MOST * (LEAD + BLOCK) + LEARNING


def test_it_pauses_where_it_costs_and_asks_again_ever_later() -> None:
    one, said = throttle()
    assert feed(one, FEWEST, 10, 12) == [True] * (LEAD + BLOCK) + [False] * (LEAD + FEW + LEARNING)
    assert said == [
        f"prefetching paused: 12 ms a token with it, 10 without, over {FEW} tokens each; compared again in {REST} "
        "tokens"
    ]
    assert one.seen == (pytest.approx(12, rel=1e-2), pytest.approx(10, rel=1e-2), FEW, False)
    assert all(feed(one, REST, 10, 12)), "paused until it is compared again"
    feed(one, FEWEST, 10, 12)
    assert one.paused and f"in {2 * REST} tokens" in said[1]
    feed(one, 6 * LONGEST, 10, 12)
    assert f"in {LONGEST} tokens" in said[-1] and f"in {LONGEST} tokens" in said[-2]


def test_it_goes_on_where_it_pays_and_after_a_change_of_heart_is_asked_again_soon() -> None:
    one, said = throttle()
    feed(one, FEWEST, 10, 8)
    assert "goes on" in said[0] and not any(feed(one, REST, 10, 8))
    feed(one, FEWEST, 10, 8)
    assert f"in {2 * REST} tokens" in said[1]
    feed(one, 2 * REST + FEWEST, 10, 12)
    assert "paused" in said[2] and f"in {REST} tokens" in said[2] and one.paused


def test_where_nothing_is_told_apart_it_pauses() -> None:
    one, said = throttle()
    feed(one, MOST * (LEAD + BLOCK) + LEARNING)
    assert one.paused and "not told apart" in said[0]


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_only_decoded_tokens_count_and_only_while_it_is_on(phase: str) -> None:
    one, said = throttle()
    one.enabled = phase == "prefill"
    for _ in range(5 * FEWEST):
        one.note(step(10.0 if one.paused else 20.0, phase))
    assert not said and one.paused is one.enabled, "paused before anything is known, and never while it is off"


def test_what_waits_for_no_copies_is_not_tried_with_prefetching() -> None:
    one, said = throttle()
    for at in range(LEAD + BLOCK + REST + LEAD + BLOCK + 2 * REST):
        assert one.paused, at
        one.note(step(10.0, waited=0.02))
    assert one.waits == (pytest.approx(0.2), 10.0) and one.last is None
    assert (
        said[0] == f"prefetching paused: copies are waited for 0.2 of a token's 10 ms; looked at again in {REST} tokens"
    )
    assert len(said) == 2 and f"again in {2 * REST} tokens" in said[1]
    feed(one, FEWEST, 10, 8)  # half of whose time is waiting
    assert not one.paused and one.waits is None and "goes on" in said[2]


@pytest.mark.parametrize(("predict_ms", "leaves"), [(1.0, False), (3.0, True)])
def test_what_takes_longer_than_copies_are_waited_for_is_left_soon(predict_ms: float, leaves: bool) -> None:
    """Between 1 and 2 ms of a token's 10 are waited."""
    one, said = throttle()
    draw, with_it = random.Random(3), 0
    while not said and with_it <= SHOWN:
        with_it += not one.paused
        one.note(step(10.0, waited=draw.uniform(0.1, 0.2), predict_ms=0.0 if one.paused else predict_ms))
    assert bool(said) is leaves and (not leaves or with_it == SHOWN)
    if leaves:
        assert one.paused and one.last is None and f"ms, predicting takes {predict_ms:g}; looked at again" in said[0]
        feed(one, REST + FEWEST, 10, 8)
        assert not one.paused, "it is tried again"


def test_another_setting_begins_anew() -> None:
    one, said = throttle()
    feed(one, FEWEST, 10, 8)
    assert not one.paused
    one.restart()
    assert one.paused and one.last is one.seen is None
    feed(one, FEWEST, 10, 12)
    assert one.paused and len(said) == 2


def test_what_predicting_took_is_known_to_the_next_first_look_of_the_same_way() -> None:
    one, said = throttle()

    def tokens_with_it(way: str, predict_ms: float, waited: float = 0.05) -> int:
        one.restart(way)
        count, looks = 0, len(said)
        while len(said) == looks:
            count += not one.paused
            one.note(step(10.0, waited=waited, predict_ms=0.0 if one.paused else predict_ms))
        return count

    assert tokens_with_it("gate", 0.9) == SHOWN
    assert tokens_with_it("gate", 0.9) == 0 and "predicting takes 0.9" in said[-1]
    assert tokens_with_it("transitions", 0.9) == SHOWN, "another way"
    assert tokens_with_it("gate", 0.9, waited=0.5) > SHOWN, "it may save more than it takes"
    tokens_with_it("gate", 0.9)
    feed(one, REST)
    assert one.comparing
    while one.paused:
        one.note(step(10.0, waited=0.05))
    assert one.comparing, "it is measured anew"


def foretelling(saved_ms: float, count: int = SHOWN) -> tuple[Throttle, list[str]]:
    """A throttle of what foretells to save so much of each of some tokens of 10 ms."""
    one, said = Throttle("computing on the host", foretells=True), list[str]()
    one.enabled, one.say = True, said.append
    for _ in range(count):
        assert not one.paused and one.comparing
        one.note(step(10.0, "prefill"), 50.0)
        one.note(step(10.0), saved_ms)
    return one, said


def test_what_clearly_saves_goes_on_without_a_token_that_waits() -> None:
    one, said = foretelling(10.0 * (1 / CLEAR - 1) + 0.01)
    assert not one.paused and not one.comparing and one.predicted
    assert one.seen is not None and one.seen[0] == 10.0 and one.seen[1] > 16.6 and one.seen[3]
    (text,) = said
    assert "goes on: 10 ms a token with it, 16.7 without, as foretold, over 3 tokens each" in text
    feed(one, REST)
    assert not one.paused and one.comparing, "it is weighed again"
    for _ in range(SHOWN):
        one.note(step(10.0), 0.0)
    assert one.paused and not one.comparing, "and now saves nothing"


def test_what_foretells_next_to_nothing_is_paused_and_what_is_in_between_is_compared() -> None:
    one, _ = foretelling(0.1)
    assert one.paused and not one.comparing
    one, _ = foretelling(4.0)
    assert one.paused and one.comparing and not one.predicted
    while one.comparing:
        feed(one, 1, without=10.0, with_it=20.0)
    assert one.paused and one.seen is not None and not one.seen[3] and not one.predicted


def test_what_is_never_slower_goes_on_whatever_is_foretold() -> None:
    one, said = Throttle("computing on the host", foretells=True), list[str]()
    one.enabled, one.free, one.say = True, True, said.append
    for _ in range(SHOWN):
        assert not one.paused
        one.note(step(10.0), 0.01)
    assert not one.paused and not one.comparing and one.seen is not None and one.seen[3] and "goes on" in said[0]


def test_what_comes_after_waits_for_what_is_compared_first() -> None:
    first, _ = foretelling(4.0)
    then, said = throttle()
    then.after = first
    for _ in range(200):
        then.note(step(10.0))
    assert then.paused and then.comparing and not said, "the first comparison is not over"
    first.enabled = False
    feed(then, FEWEST, with_it=5.0)
    assert not then.paused
