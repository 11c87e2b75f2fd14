"""How long a pass may wait for its prediction, in numbers."""

import pytest

from core.policy.prefetch.wait_bound import WINDOW, WaitBound
from core.runtime.prediction.answer_wait import AnswerWait


def test_the_bound_is_the_stall_that_an_answer_in_time_spares_by_hand() -> None:
    bound = WaitBound()
    assert bound.limit_s(1, 0.0) == 0.0  # nothing is known
    bound.searched(1, 0.002)
    assert bound.limit_s(1, 0.0) == 0.0  # not what it saves
    for stall_s in (0.010, 0.014):
        bound.passed(1, stall_s, 0.0, in_time=False)
    assert bound.saves_s(1) == pytest.approx(0.012)  # no pass had an answer in time yet: all of the stall, at most
    bound.passed(1, 0.004, 0.005, in_time=True)
    assert bound.saves_s(1) == pytest.approx(0.008)
    assert bound.limit_s(1, 0.0) == pytest.approx(0.008)
    bound.passed(1, 0.040, 0.005, in_time=True)  # predictions do not help here
    assert bound.saves_s(1) == bound.limit_s(1, 0.0) == 0.0
    bound.restart()
    assert bound.saves_s(1) == 0.0


def test_without_a_late_answer_what_prefetches_spared_stands_for_it() -> None:
    bound = WaitBound()
    bound.searched(1, 0.002)
    bound.passed(1, 0.001, 0.003, in_time=True)
    assert bound.limit_s(1, 0.0) == pytest.approx(0.003)


def test_what_is_left_of_a_search_must_be_worth_it() -> None:
    bound = WaitBound()
    bound.passed(1, 0.005, 0.0, in_time=False)
    for took_s in (0.006, 0.007, 0.5):  # the median counts
        bound.searched(1, took_s)
    assert bound.limit_s(1, 0.0) == 0.0
    assert bound.limit_s(1, 0.002) == pytest.approx(0.005)  # asked 2 ms ago: 5 ms are left
    for _ in range(WINDOW):
        bound.searched(1, 0.001)
    assert bound.limit_s(1, 0.0) == pytest.approx(0.005)


def test_prompts_are_judged_apart_by_their_tokens() -> None:
    bound = WaitBound()
    bound.searched(10, 0.010)
    bound.passed(10, 0.015, 0.0, in_time=False)
    assert bound.limit_s(12, 0.0) == pytest.approx(0.015)
    assert bound.limit_s(20, 0.0) == 0.0  # would take 20 ms
    assert bound.limit_s(1, 0.0) == 0.0


def test_a_search_without_an_answer_counts_as_long_as_it_was_out() -> None:
    now = [0.0]
    wait = AnswerWait(lambda: now[0], lambda: None)
    wait.asked(1, 1)
    wait.wait(1, 1, lambda: False)
    wait.passed(0.002, 0.0)
    now[0] = 0.1
    wait.asked(2, 1)
    wait.wait(2, 1, lambda: False)  # 1 has taken 100 ms at least: not waited for, though nothing pauses
    assert wait.bound.limit_s(1, 0.0) == 0.0
    now[0] = 0.2
    wait.answered(1)  # no longer expected
    wait.answered(2)
    wait.passed(0.002, 0.0)
    wait.passed(9.0, 0.0)  # no pass of this predictor's
    assert wait.bound.saves_s(1) == pytest.approx(0.002)
