"""What the cache does with a lease, a prefetch, a change of policy: case by case."""

from __future__ import annotations

import numpy as np
import pytest

from core.memory.link import Pace
from core.policy.predict import LayerMap, Prediction
from core.settings.registry import create, variants
from core.types import Outcome
from tests.cache.machine import EXPERTS, LAYERS, build, hold

K = 2
NAMES = [v.name for v in variants("eviction")]
SLOW = 1e-9  # GB/s: the first copy takes minutes, and nobody waits for it: what follows it is queued on any machine


def test_a_leased_expert_is_never_evicted() -> None:
    expert_cache = build(LAYERS * K)
    lease = hold(expert_cache, 0, [0, 1])
    with pytest.raises(RuntimeError, match="more slots"):
        expert_cache.acquire(0, [2])
    assert expert_cache.is_resident(0)
    assert expert_cache.is_resident(1)
    expert_cache.release(lease)


def test_outcomes_and_counts_of_a_prefetch_that_is_used_and_one_that_is_not() -> None:
    expert_cache = build(LAYERS * 3)
    expert_cache.prefetch([Prediction(1, 4, 0.9), Prediction(1, 5, 0.8)], -1)
    for ticket in list(expert_cache.copies.tickets.values()):
        expert_cache.copies.link.wait(ticket)
    lease = hold(expert_cache, 1, [4, 0])
    assert {h.expert: h.outcome for h in lease.segments} == {4: Outcome.PREFETCH_HIT, 0: Outcome.MISS}
    counts, size = expert_cache.take_counts(), expert_cache.arena.codec.blob_bytes
    assert (counts.prefetch_issued, counts.prefetch_used, counts.prefetch_late, counts.prefetch_wasted) == (2, 1, 0, 1)
    assert (counts.demand_bytes, counts.prefetch_bytes, counts.wasted_bytes) == (size, 2 * size, size)
    expert_cache.release(lease)
    again = hold(expert_cache, 1, [4])
    assert again.segments[0].outcome == Outcome.HIT  # only the first use is the prefetch's


def test_a_copy_in_flight_is_late_and_a_queued_one_is_a_miss() -> None:
    expert_cache = build(LAYERS * 3)
    expert_cache.copies.link.pace = Pace(gbps=SLOW, latency_us=0.0)
    expert_cache.prefetch([Prediction(0, 0, 0.9), Prediction(0, 1, 0.8)], -1)
    first, second = expert_cache.copies.tickets[0], expert_cache.copies.tickets[1]
    first.done.wait()
    assert not second.done.is_set()
    expert_cache.arrive(0, [0, 1])
    lease = expert_cache.acquire(0, [0, 1])
    assert {h.expert: h.outcome for h in lease.segments} == {0: Outcome.PARTIAL_HIT, 1: Outcome.MISS}
    counts = expert_cache.take_counts()
    assert (counts.prefetch_issued, counts.prefetch_used, counts.prefetch_late, counts.prefetch_wasted) == (1, 0, 1, 0)


def test_a_better_guess_takes_the_slot_of_a_queued_one() -> None:
    expert_cache = build(LAYERS * 2)
    expert_cache.copies.link.pace = Pace(gbps=SLOW, latency_us=0.0)
    expert_cache.prefetch([Prediction(0, 5, 1.0)], 1)
    expert_cache.copies.tickets[5].done.wait()
    expert_cache.prefetch([Prediction(1, 0, 0.3), Prediction(1, 1, 0.2)], 0)  # both slots of layer 1
    expert_cache.prefetch([Prediction(1, 2, 0.25)], 0)
    assert [expert_cache.is_resident(EXPERTS + e) for e in range(3)] == [True, False, True]
    expert_cache.prefetch(
        [Prediction(1, 2, 0.5), Prediction(1, 3, 0.1)], 0
    )  # ranked anew; nothing that is worse leaves for 3
    assert [ticket.eid for ticket in expert_cache.copies.link._queue.prefetch] == [EXPERTS, EXPERTS + 2]
    assert not expert_cache.is_resident(EXPERTS + 3)
    expert_cache.check_integrity()


def test_what_a_wasted_prefetch_displaced_is_counted_when_it_is_demanded_again() -> None:
    expert_cache = build(LAYERS * 2)
    expert_cache.release(hold(expert_cache, 1, [0, 1]))
    expert_cache.prefetch([Prediction(1, 2, 0.9)], 0)  # 0 was used first: it leaves
    expert_cache.copies.link.wait(expert_cache.copies.tickets[EXPERTS + 2])
    expert_cache.release(hold(expert_cache, 1, [1]))  # 2 came to nothing
    lease = hold(expert_cache, 1, [0, 1])
    counts = expert_cache.take_counts()
    assert (
        [ticket.eid for ticket in counts.lost] == [EXPERTS]
        and counts.prefetch_wasted == 1
        and counts.prefetch_evicted == 0
    )
    expert_cache.release(lease)
    expert_cache.release(hold(expert_cache, 1, [3]))
    expert_cache.release(hold(expert_cache, 1, [0]))  # that it left for a demand is nobody's fault
    assert expert_cache.take_counts().lost == []


def test_a_prefetch_that_demands_put_out_is_evicted_before_its_use() -> None:
    expert_cache = build(3, "global")
    expert_cache.prefetch([Prediction(2, 0, 0.9)], 0)
    expert_cache.copies.link.wait(expert_cache.copies.tickets[2 * EXPERTS])
    expert_cache.release(hold(expert_cache, 0, [0, 1]))
    expert_cache.release(hold(expert_cache, 1, [0, 1]))
    counts, size = expert_cache.take_counts(), expert_cache.arena.codec.blob_bytes
    assert (counts.prefetch_wasted, counts.prefetch_evicted, counts.wasted_bytes, counts.evicted_bytes) == (
        1,
        1,
        size,
        size,
    )


def test_the_deadline_keeps_the_link_free() -> None:
    expert_cache = build(LAYERS * 3)
    expert_cache.copies.link.pace = Pace(gbps=SLOW, latency_us=0.0)  # a copy takes far longer than a layer
    expert_cache.prefetch_queue.schedule.deadline = True
    expert_cache.copies.phase = "decode"
    for layer in range(LAYERS):
        expert_cache.prefetch([], layer)  # the rhythm is measured
    expert_cache.prefetch([Prediction(0, 0, 1.0)], LAYERS - 1)
    assert not expert_cache.is_resident(0)
    expert_cache.prefetch_queue.schedule.deadline = False
    expert_cache.prefetch([Prediction(0, 0, 1.0)], LAYERS - 1)
    assert expert_cache.is_resident(0)


def test_a_queued_prefetch_that_is_not_wanted_is_taken_back() -> None:
    expert_cache = build(LAYERS * 3)
    expert_cache.copies.link.pace = Pace(gbps=SLOW, latency_us=0.0)
    expert_cache.prefetch([Prediction(0, e, 0.9) for e in range(3)], -1)
    expert_cache.copies.tickets[0].done.wait()
    expert_cache.arrive(0, [5])
    assert [expert_cache.is_resident(e) for e in range(3)] == [True, False, False]  # the copies of two never started
    assert expert_cache.take_counts().wasted_bytes == expert_cache.arena.codec.blob_bytes


def test_what_a_predictor_names_stays_until_its_layer_is_reached() -> None:
    expert_cache = build(6, "global", "plec")
    expert_cache.release(hold(expert_cache, 1, [0, 1, 2, 3]))  # eids 6 to 9
    expert_cache.prefetch([Prediction(1, 0, 0.7)], -1)
    assert expert_cache.hints.predicted[6]
    expert_cache.release(hold(expert_cache, 0, [0, 1, 2, 3, 4]))  # takes the free slots, then the places of three
    assert [expert_cache.is_resident(e) for e in range(6, 10)] == [True, False, False, False]
    expert_cache.release(hold(expert_cache, 1, [5]))
    assert not expert_cache.hints.predicted.any()
    expert_cache.check_integrity()


def test_a_map_orders_a_whole_layer_and_holds_until_a_newer_one_speaks_of_it() -> None:
    expert_cache = build(5, "global", "finemoe")
    expert_cache.release(hold(expert_cache, 1, [0, 1, 2, 3]))  # eids 6 to 9, one visit each
    expert_cache.prefetch([], -1, [LayerMap(1, np.array([0.4, 0.3, 0.1, 0.05, 0.08, 0.07], np.float32))])
    expert_cache.release(hold(expert_cache, 0, [0, 1]))  # a free slot, then that of the unlikeliest, which nobody named
    assert [expert_cache.is_resident(e) for e in range(6, 10)] == [True, True, True, False]
    expert_cache.release(hold(expert_cache, 1, [0]))  # reached: it still holds
    expert_cache.release(hold(expert_cache, 0, [2]))
    assert [expert_cache.is_resident(e) for e in range(6, 10)] == [True, True, False, False]
    expert_cache.prefetch([], 1, [LayerMap(1, np.array([0.01, 0.9, 0.02, 0.03, 0.02, 0.02], np.float32))])
    expert_cache.release(hold(expert_cache, 0, [3]))
    assert [expert_cache.is_resident(e) for e in range(6, 10)] == [False, True, False, False]
    expert_cache.check_integrity()


def test_lcp_fades_by_tokens_so_that_a_long_prompt_counts_as_many() -> None:
    expert_cache = build(LAYERS * 2, "layer", "lcp")  # half a priority in 64 tokens
    for expert in (0, 0, 0, 1):
        expert_cache.begin_pass("decode", 1)
        expert_cache.release(hold(expert_cache, 0, [expert]))
    expert_cache.begin_pass("prefill", 200)
    expert_cache.release(hold(expert_cache, 0, [1]))
    expert_cache.begin_pass("decode", 1)
    expert_cache.release(hold(expert_cache, 0, [2]))  # of 3 uses 200 tokens ago .34 are left, of 2 just now nearly 2
    assert [expert_cache.is_resident(e) for e in range(3)] == [False, True, True]


def test_changing_the_policy_keeps_who_was_used_last() -> None:
    expert_cache = build(LAYERS * 4)
    for step, expert in enumerate([0, 1, 2, 3]):
        expert_cache.core.now = step
        expert_cache.release(hold(expert_cache, 0, [expert]))
    expert_cache.reshape(slots=LAYERS * 2)
    assert [expert_cache.is_resident(e) for e in range(4)] == [False, False, True, True]
    expert_cache.reshape(
        scope="global", make_policy=lambda expert_index: create("eviction", "lfu", {}, expert_index=expert_index)
    )
    assert [expert_cache.is_resident(e) for e in range(4)] == [False, False, True, True]
    expert_cache.check_integrity()


@pytest.mark.parametrize("scope", ["layer", "global"])
def test_a_fresh_cache_is_filled_and_what_is_used_then_stays(scope: str) -> None:
    expert_cache = build(LAYERS * 2, scope)
    expert_cache.fill()
    expert_cache.check_integrity()
    resident = [[expert_cache.is_resident(layer * EXPERTS + e) for e in range(3)] for layer in range(LAYERS)]
    assert resident == [[True, True, False]] * LAYERS
    lease = hold(expert_cache, 0, [1, 5])
    assert {h.expert: h.outcome for h in lease.segments} == {1: Outcome.HIT, 5: Outcome.MISS}
    expert_cache.release(lease)
    assert (
        expert_cache.take_counts().demand_bytes == expert_cache.arena.codec.blob_bytes
    )  # filling is not counted as demand


def test_a_failed_prefetch_is_never_computed_from_and_can_be_fetched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    expert_cache = build(LAYERS * 3)
    with monkeypatch.context() as patched:
        patched.setattr(expert_cache.copies.link, "_fetch", lambda eid, slot: 1 / 0)
        expert_cache.prefetch([Prediction(0, 4, 0.9)], -1)
        expert_cache.copies.tickets[4].done.wait()
    assert expert_cache.places()[4] == 1  # in flight, and no further
    expert_cache.arrive(0, [4])
    held = expert_cache.acquire(0, [4]).segments[0]
    assert held.ticket is not None
    with pytest.raises(RuntimeError, match="copy of expert weights failed"):
        expert_cache.copies.link.wait(held.ticket)
    expert_cache.abandon()
    expert_cache.check_integrity()
    assert not expert_cache.is_resident(4)
    expert_cache.release(hold(expert_cache, 0, [4]))  # its bytes are checked there
