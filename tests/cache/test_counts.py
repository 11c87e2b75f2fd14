"""What prefetching saved and cost, worked out by hand; seconds."""

from typing import Any

import pytest

from core.cache.counts import Counts, PrefetchCost, blocked_s
from core.memory.slot import Slot
from core.memory.ticket import Ticket
from core.types import Segment

NOTHING: Any = None


def copy(start_s: float, end_s: float, demand: bool, submitted_s: float | None = None) -> Ticket:
    ticket = Ticket(Segment(0, range(1)), [Slot(0, NOTHING, NOTHING)], 1, demand, "decode")
    ticket.started_s, ticket.landed_s = start_s, end_s
    ticket.submitted_s = start_s if submitted_s is None else submitted_s
    return ticket


def test_a_demand_is_held_up_by_what_is_left_of_a_prefetch_and_only_once() -> None:
    # A prefetch from 0 to 4; demands at 1 and 2 wait behind it: the link is 3 late. None is in flight from 5 on.
    assert blocked_s([(0.0, 4.0)], [1.0, 2.0, 5.0]) == 3.0
    assert blocked_s([(0.0, 4.0), (6.0, 9.0)], [1.0, 8.0]) == 3.0 + 1.0
    assert blocked_s([(2.0, 4.0)], [1.0]) == 0.0  # submitted before: the prefetch came after it
    assert blocked_s([], [1.0]) == blocked_s([(0.0, 4.0)], []) == 0.0


def test_saved_less_cost() -> None:
    # Two copies of 3 s each were spared, one of them late: 1 s of waiting. The predictor took 0.5 s. A wasted prefetch
    # from 10 to 13 held up the demand submitted at 11 for 2 s; an expert it had displaced was fetched again in 3 s.
    # Computing waited 7 s in all, 6 s of it for demands: saved 6 - 1, cost 0.5 + (2 + 3), net -0.5 s.
    prefetch_cost, again = PrefetchCost(), copy(13.0, 16.0, True, 11.0)
    prefetch_cost.begin()
    prefetch_cost.predict_s = 0.5
    used, late, wasted = copy(0.0, 3.0, False), copy(3.0, 6.0, False), copy(10.0, 13.0, False)
    counts = Counts()
    counts.spared, counts.lost = [used, late], [again]
    assert prefetch_cost.net_ms(counts, [used, late, wasted, again], 1.0, 7.0) == pytest.approx(-500.0)


def test_what_was_hidden_behind_computing_cost_nothing() -> None:
    prefetch_cost, demand, wasted = PrefetchCost(), copy(13.0, 16.0, True, 11.0), copy(10.0, 13.0, False)
    net_ms = prefetch_cost.net_ms(Counts(), [wasted, demand], 0.0, 0.25)
    assert net_ms == pytest.approx(-250.0), "held up for 2 s, waited 0.25"


def test_a_prefetch_in_flight_when_a_pass_ends_holds_up_the_next_one() -> None:
    prefetch_cost = PrefetchCost()
    assert prefetch_cost.net_ms(Counts(), [copy(1.0, 9.0, False)], 0.0, 0.0) == 0.0
    assert prefetch_cost.net_ms(Counts(), [copy(9.0, 10.0, True, 8.0)], 0.0, 5.0) == pytest.approx(-1000.0)
    assert prefetch_cost.net_ms(Counts(), [copy(20.0, 21.0, True)], 0.0, 5.0) == 0.0


def test_without_prefetching_nothing_is_saved_and_nothing_lost() -> None:
    assert PrefetchCost().net_ms(Counts(), [copy(1.0, 2.0, True, 0.5)], 0.0, 1.5) == 0.0
