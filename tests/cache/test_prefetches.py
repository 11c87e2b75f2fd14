"""Prefetches, into the cache by eviction and into the buffer: counted, cancelled, given up; what they saved."""

import threading
from typing import Any

import pytest

from core.cache.counts import Counts, PrefetchCost, blocked_s
from core.cache.expert_cache import ExpertCache
from core.memory.link import Pace
from core.memory.slot import Slot
from core.memory.ticket import Ticket
from core.policy.predict import Prediction
from core.settings.prefetch import PrefetchSettings
from core.types import Outcome, Segment
from tests.cache.machine import EXPERTS, LAYERS, build, hold, landed, residents, use

SLOW = 1e-9  # GB/s: the first copy takes minutes, and no test waits for it: all others are queued on any machine
both = pytest.mark.parametrize("to_buffer", [False, True], ids=["evicting", "buffered"])


def cache_with(per_layer: int, *, to_buffer: bool, transit: int = 3, slow: bool = False) -> ExpertCache:
    """So many slots per layer, and a buffer of `transit` experts where prefetches go `to_buffer`."""
    cache = build(LAYERS * per_layer + transit * to_buffer, transit=transit * to_buffer)
    cache.prefetch_by(None, PrefetchSettings(beside=to_buffer))
    assert cache.prefetch_queue.to_buffer == to_buffer
    if slow:
        cache.copies.link.pace = Pace(gbps=SLOW, latency_us=0.0)
    return cache


@both
def test_outcomes_and_counts_of_a_prefetch_that_is_used_and_one_that_is_not(to_buffer: bool) -> None:
    cache = cache_with(3, to_buffer=to_buffer)
    cache.prefetch([Prediction(1, 4, 0.9), Prediction(1, 5, 0.8)], -1)
    landed(cache)
    lease = hold(cache, 1, [4, 0])
    assert {h.expert: h.outcome for h in lease.requests} == {4: Outcome.PREFETCH_HIT, 0: Outcome.MISS}
    counts, size = cache.take_counts(), cache.copies.expert_bytes
    assert (counts.prefetch_issued, counts.prefetch_used, counts.prefetch_late, counts.prefetch_wasted) == (2, 1, 0, 1)
    assert (counts.demand_bytes, counts.prefetch_bytes, counts.wasted_bytes) == (size, 2 * size, size)
    cache.release(lease)
    cache.check_integrity()
    assert hold(cache, 1, [4]).requests[0].outcome == Outcome.HIT, "only the first use is the prefetch's"


@both
def test_a_copy_in_flight_is_late_and_a_queued_one_is_a_miss(to_buffer: bool) -> None:
    cache = cache_with(3, to_buffer=to_buffer, slow=True)
    cache.prefetch([Prediction(0, 0, 0.9), Prediction(0, 1, 0.8)], -1)
    first, second = cache.copies.tickets[0], cache.copies.tickets[1]
    first.done.wait()
    assert not second.done.is_set()
    cache.arrive(0, [0, 1])
    lease = cache.acquire(0, [0, 1])
    assert {h.expert: h.outcome for h in lease.requests} == {0: Outcome.PARTIAL_HIT, 1: Outcome.MISS}
    counts = cache.take_counts()
    assert (counts.prefetch_issued, counts.prefetch_used, counts.prefetch_late, counts.prefetch_wasted) == (1, 0, 1, 0)
    assert counts.demand_bytes == counts.late_bytes == cache.copies.expert_bytes


@both
def test_a_queued_prefetch_that_is_not_wanted_is_cancelled(to_buffer: bool) -> None:
    cache = cache_with(3, to_buffer=to_buffer, slow=True)
    cache.prefetch([Prediction(0, e, 0.9) for e in range(3)], -1)
    cache.copies.tickets[0].done.wait()
    cache.arrive(0, [5])
    assert residents(cache, 0) == ([] if to_buffer else [0]), "two copies never started; the buffer keeps no wasted one"
    counts = cache.take_counts()
    assert counts.wasted_bytes == cache.copies.expert_bytes and counts.prefetch_issued == counts.prefetch_wasted == 1
    assert not cache.has_pending_prefetches


@both
def test_a_failed_prefetch_is_unused_and_can_be_fetched_again(to_buffer: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = cache_with(3, to_buffer=to_buffer)
    with monkeypatch.context() as patched:
        patched.setattr(cache.copies.link, "_fetch", lambda eid, slot: 1 / 0)
        cache.prefetch([Prediction(0, 4, 0.9)], -1)
        cache.copies.tickets[4].done.wait()
    assert cache.places()[4] == 1  # in flight, and no further
    cache.arrive(0, [4])
    held = cache.acquire(0, [4]).segments[0]
    assert held.ticket is not None
    with pytest.raises(RuntimeError, match="copy of expert weights failed"):
        cache.copies.link.wait(held.ticket)
    cache.abandon()
    cache.check_integrity()
    assert not cache.is_resident(4)
    cache.release(hold(cache, 0, [4]))  # its bytes are checked there


@both
def test_only_a_prefetch_into_the_cache_evicts(to_buffer: bool) -> None:
    cache = cache_with(2, to_buffer=to_buffer)
    cache.release(hold(cache, 1, [0, 1]))
    cache.prefetch([Prediction(1, 2, 1.0)], 0)
    landed(cache)
    assert residents(cache, 1) == ([0, 1, 2] if to_buffer else [1, 2])
    assert cache.prefetch_queue.fresh[EXPERTS + 2].displaced == (-1 if to_buffer else EXPERTS)
    assert use(cache, 1, 2) == [Outcome.PREFETCH_HIT]
    assert residents(cache, 1) == [1, 2], "a used prefetch is in the cache, and the least recently used one is not"


def test_a_prefetch_waits_for_room_in_the_buffer() -> None:
    cache = cache_with(3, to_buffer=True, transit=1)
    cache.prefetch([Prediction(1, 4, 0.9), Prediction(1, 5, 0.8), Prediction(2, 4, 0.7)], -1)
    assert [*cache.prefetch_queue.fresh] == [EXPERTS + 4]
    landed(cache)
    cache.release(hold(cache, 0, [0]))
    assert [*cache.prefetch_queue.fresh] == [EXPERTS + 4]
    cache.prefetch([], 0)  # nothing new is known: what waits still waits
    assert [*cache.prefetch_queue.fresh] == [EXPERTS + 4]
    cache.release(hold(cache, 1, [0]))  # wasted; the prefetch that still waits for layer 1 is forgotten
    assert [*cache.prefetch_queue.fresh] == [2 * EXPERTS + 4]
    cache.check_integrity()
    landed(cache)
    assert use(cache, 2, 4) == [Outcome.PREFETCH_HIT]


def test_a_wasted_prefetch_stays_in_the_buffer_until_its_copy_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compute thread does not wait for it."""
    cache, started, gate = cache_with(3, to_buffer=True), threading.Event(), threading.Event()
    fetch = cache.copies.link._fetch

    def held(*args: object) -> object:
        started.set()
        gate.wait(5)
        return fetch(*args)

    monkeypatch.setattr(cache.copies.link, "_fetch", held)
    cache.prefetch([Prediction(0, 4, 0.9)], -1)
    ticket = cache.copies.tickets[4]
    assert started.wait(60)
    cache.arrive(0, [5])
    assert cache.is_resident(4) and not cache.has_pending_prefetches and cache.counts.prefetch_wasted == 1
    gate.set()
    cache.copies.link.settle(ticket)
    cache.arrive(1, [0])
    assert not cache.is_resident(4) and len(cache.core.transit) == 3
    cache.check_integrity()


def test_a_better_prediction_takes_the_slot_of_a_queued_one() -> None:
    cache = cache_with(2, to_buffer=False, slow=True)
    cache.prefetch([Prediction(0, 5, 1.0)], 1)
    cache.copies.tickets[5].done.wait()
    cache.prefetch([Prediction(1, 0, 0.3), Prediction(1, 1, 0.2)], 0)  # both slots of layer 1
    cache.prefetch([Prediction(1, 2, 0.25)], 0)
    assert residents(cache, 1) == [0, 2]
    cache.prefetch([Prediction(1, 2, 0.5), Prediction(1, 3, 0.1)], 0)  # ranked anew; no worse one is evicted for 3
    assert [t.eid for t in cache.copies.link._queue.prefetch] == [EXPERTS, EXPERTS + 2]
    assert residents(cache, 1) == [0, 2]
    cache.check_integrity()


def test_an_expert_displaced_by_a_wasted_prefetch_is_counted_when_it_is_demanded_again() -> None:
    cache = cache_with(2, to_buffer=False)
    cache.release(hold(cache, 1, [0, 1]))
    cache.prefetch([Prediction(1, 2, 0.9)], 0)  # 0 was used first: it is evicted
    landed(cache)
    cache.release(hold(cache, 1, [1]))  # 2 is wasted
    lease = hold(cache, 1, [0, 1])
    counts = cache.take_counts()
    assert [ticket.eid for ticket in counts.lost] == [EXPERTS]
    assert (counts.prefetch_wasted, counts.prefetch_evicted) == (1, 0)
    cache.release(lease)
    cache.release(hold(cache, 1, [3]))
    cache.release(hold(cache, 1, [0]))  # it was evicted for a demand, which is no prefetch's fault
    assert cache.take_counts().lost == []


def test_a_prefetch_that_demands_evict_before_its_use_is_wasted() -> None:
    cache = build(3, "global")
    cache.prefetch([Prediction(2, 0, 0.9)], 0)
    landed(cache)
    cache.release(hold(cache, 0, [0, 1]))
    cache.release(hold(cache, 1, [0, 1]))
    counts, size = cache.take_counts(), cache.copies.expert_bytes
    assert (counts.prefetch_wasted, counts.prefetch_evicted) == (1, 1)
    assert (counts.wasted_bytes, counts.evicted_bytes) == (size, size)


def test_the_deadline_keeps_the_link_free() -> None:
    cache = cache_with(3, to_buffer=False, slow=True)  # a copy takes far longer than a layer
    cache.prefetch_queue.schedule.deadline = True
    cache.copies.phase = "decode"
    for layer in range(LAYERS):
        cache.prefetch([], layer)  # the rhythm is measured
    cache.prefetch([Prediction(0, 0, 1.0)], LAYERS - 1)
    assert not cache.is_resident(0)
    cache.prefetch_queue.schedule.deadline = False
    cache.prefetch([Prediction(0, 0, 1.0)], LAYERS - 1)
    assert cache.is_resident(0)


NOTHING: Any = None


def copy(start_s: float, end_s: float, demand: bool, submitted_s: float | None = None) -> Ticket:
    ticket = Ticket(Segment(0, range(1)), [Slot(0, NOTHING)], 1, demand, "decode")
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
