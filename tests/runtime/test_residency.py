"""The cache under any sequence of what can happen to it: nothing lost, nothing shared, nothing wrong in a slot."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from core.cache.expert_cache import Residency
from core.memory.link import Pace
from core.policy.predict import Guess
from core.settings.registry import create, variants
from core.types import Outcome, Place
from tests.runtime.machine import EXPERTS, LAYERS, build, hold

K = 2
NAMES = [v.name for v in variants("eviction")]
distinct = st.lists(st.integers(0, EXPERTS - 1), min_size=1, max_size=K, unique=True)


class Cache(RuleBasedStateMachine):
    """Random layers, prefetches, resizes and policy changes over real copies."""

    residency: Residency

    @initialize(
        slots=st.integers(LAYERS * K, LAYERS * EXPERTS),
        scope=st.sampled_from(["layer", "global"]),
        eviction=st.sampled_from(NAMES),
        paced=st.booleans(),
    )
    def start(self, slots: int, scope: str, eviction: str, paced: bool) -> None:
        self.residency = build(slots, scope, eviction)
        if paced:
            self.residency.transfers.pace = Pace(5.0, 1.0)

    @rule(layer=st.integers(0, LAYERS - 1), wanted=distinct)
    def compute(self, layer: int, wanted: list[int]) -> None:
        self.residency.now += 1
        before = [self.residency.is_resident(layer * EXPERTS + e) for e in wanted]
        lease = hold(self.residency, layer, wanted)
        outcomes = {h.expert: h.outcome for h in lease.held}
        assert all(outcomes[e] == Outcome.MISS for e, there in zip(wanted, before, strict=True) if not there)
        self.residency.release(lease)

    @rule(
        guesses=st.lists(st.tuples(st.integers(0, LAYERS - 1), st.integers(0, EXPERTS - 1)), max_size=6, unique=True),
        score=st.floats(0, 1),
        at=st.integers(-1, LAYERS - 1),
    )
    def prefetch(self, guesses: list[tuple[int, int]], score: float, at: int) -> None:
        named = [Guess(layer, expert, score / (1 + i)) for i, (layer, expert) in enumerate(guesses)]
        self.residency.prefetch(named, at)

    @rule(
        passes=st.lists(st.tuples(st.integers(0, LAYERS - 1), distinct), max_size=8),
        patience=st.one_of(st.none(), st.integers(0, LAYERS * EXPERTS)),
        least=st.integers(1, EXPERTS),
    )
    def lend(self, passes: list[tuple[int, list[int]]], patience: int | None, least: int) -> None:
        """Passes that are nobody's leave everything as it was; when taking back is broken off, some are gone."""
        cache, asked = self.residency, 0

        def stop() -> bool:
            nonlocal asked
            asked += 1
            return patience is not None and asked > patience

        while not cache.quiet():
            pass
        before, policy, counts = cache.places(), cache.policy, cache.counts
        scores, fresh, book = policy.score.copy(), set(cache.ahead.fresh), (cache._tick, cache.now, cache._layer)
        aside = cache.set_aside(least)
        cache.check_integrity()
        for layer, wanted in passes:
            cache.now += 1
            cache.release(hold(cache, layer, wanted))
        cache.take_back(aside, stop)
        assert (cache._tick, cache.now, cache._layer) == book
        assert cache.policy is policy
        assert cache.counts is counts
        stayed = [eid for eid, place in enumerate(before) if place == Place.RESIDENT and cache.is_resident(eid)]
        assert (policy.score[stayed] == scores[stayed]).all()
        if patience is None:
            assert cache.places() == before
            assert set(cache.ahead.fresh) == fresh
        assert not any(cache.is_resident(eid) for eid, place in enumerate(before) if place != Place.RESIDENT)

    @rule(on=st.booleans())
    def deadline(self, on: bool) -> None:
        self.residency.ahead.schedule.deadline = on

    @rule(slots=st.integers(LAYERS * K, LAYERS * EXPERTS))
    def resize(self, slots: int) -> None:
        self.residency.reshape(slots=slots)
        assert len(self.residency.arena) == slots

    @rule(scope=st.sampled_from(["layer", "global"]), eviction=st.sampled_from(NAMES))
    def change(self, scope: str, eviction: str) -> None:
        self.residency.reshape(scope=scope, make_policy=lambda roster: create("eviction", eviction, {}, roster=roster))

    @invariant()
    def sound(self) -> None:
        self.residency.check_integrity()

    def teardown(self) -> None:
        if hasattr(self, "residency"):
            self.residency.transfers.close()
            self.residency.clear()
            assert len(self.residency.arena) == 0


TestCache = Cache.TestCase
TestCache.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_a_leased_expert_is_never_evicted() -> None:
    residency = build(LAYERS * K)
    lease = hold(residency, 0, [0, 1])
    with pytest.raises(RuntimeError, match="more slots"):
        residency.acquire(0, [2])
    assert residency.is_resident(0)
    assert residency.is_resident(1)
    residency.release(lease)


def test_outcomes_and_counts_of_a_prefetch_that_is_used_and_one_that_is_not() -> None:
    residency = build(LAYERS * 3)
    residency.prefetch([Guess(1, 4, 0.9), Guess(1, 5, 0.8)], -1)
    for ticket in list(residency._tickets.values()):
        residency.transfers.wait(ticket)
    lease = hold(residency, 1, [4, 0])
    assert {h.expert: h.outcome for h in lease.held} == {4: Outcome.PREFETCH_HIT, 0: Outcome.MISS}
    counts, size = residency.take_counts(), residency.arena.codec.blob_bytes
    assert (counts.issued, counts.used, counts.late, counts.wasted) == (2, 1, 0, 1)
    assert (counts.demand_bytes, counts.prefetch_bytes, counts.wasted_bytes) == (size, 2 * size, size)
    residency.release(lease)
    again = hold(residency, 1, [4])
    assert again.held[0].outcome == Outcome.HIT  # only the first use is the prefetch's


def test_a_copy_in_flight_is_late_and_a_queued_one_is_a_miss() -> None:
    residency = build(LAYERS * 3)
    residency.transfers.pace = Pace(gbps=1e-4, latency_us=0.0)  # a copy takes milliseconds: the second one queues
    residency.prefetch([Guess(0, 0, 0.9), Guess(0, 1, 0.8)], -1)
    first, second = residency._tickets[0], residency._tickets[1]
    first.done.wait()
    assert not second.done.is_set()
    lease = hold(residency, 0, [0, 1])
    assert {h.expert: h.outcome for h in lease.held} == {0: Outcome.LATE, 1: Outcome.MISS}
    counts = residency.take_counts()
    assert (counts.issued, counts.used, counts.late, counts.wasted) == (1, 0, 1, 0)
    residency.release(lease)


def test_a_better_guess_takes_the_slot_of_a_queued_one() -> None:
    residency = build(LAYERS * 2)
    residency.transfers.pace = Pace(gbps=1e-5, latency_us=0.0)  # the first copy occupies the link for long
    residency.prefetch([Guess(0, 5, 1.0)], 1)
    residency._tickets[5].done.wait()
    residency.prefetch([Guess(1, 0, 0.3), Guess(1, 1, 0.2)], 0)  # both slots of layer 1
    residency.prefetch([Guess(1, 2, 0.25)], 0)
    assert [residency.is_resident(EXPERTS + e) for e in range(3)] == [True, False, True]
    residency.prefetch([Guess(1, 2, 0.5), Guess(1, 3, 0.1)], 0)  # ranked anew; nothing that is worse leaves for 3
    assert [ticket.eid for ticket in residency.transfers._queue.prefetch] == [EXPERTS, EXPERTS + 2]
    assert not residency.is_resident(EXPERTS + 3)
    residency.check_integrity()


def test_what_a_wasted_prefetch_displaced_is_counted_when_it_is_demanded_again() -> None:
    residency = build(LAYERS * 2)
    residency.release(hold(residency, 1, [0, 1]))
    residency.prefetch([Guess(1, 2, 0.9)], 0)  # 0 was used first: it leaves
    residency.transfers.wait(residency._tickets[EXPERTS + 2])
    residency.release(hold(residency, 1, [1]))  # 2 came to nothing
    lease = hold(residency, 1, [0, 1])
    counts = residency.take_counts()
    assert [ticket.eid for ticket in counts.lost] == [EXPERTS] and counts.wasted == 1 and counts.evicted == 0
    residency.release(lease)
    residency.release(hold(residency, 1, [3]))
    residency.release(hold(residency, 1, [0]))  # that it left for a demand is nobody's fault
    assert residency.take_counts().lost == []


def test_a_prefetch_that_demands_put_out_is_evicted_before_its_use() -> None:
    residency = build(3, "global")
    residency.prefetch([Guess(2, 0, 0.9)], 0)
    residency.transfers.wait(residency._tickets[2 * EXPERTS])
    residency.release(hold(residency, 0, [0, 1]))
    residency.release(hold(residency, 1, [0, 1]))
    counts, size = residency.take_counts(), residency.arena.codec.blob_bytes
    assert (counts.wasted, counts.evicted, counts.wasted_bytes, counts.evicted_bytes) == (1, 1, size, size)


def test_the_deadline_keeps_the_link_free() -> None:
    residency = build(LAYERS * 3)
    residency.transfers.pace = Pace(gbps=1e-6, latency_us=0.0)  # a copy takes far longer than a layer here
    residency.ahead.schedule.deadline = True
    residency.phase = "decode"
    for layer in range(LAYERS):
        residency.prefetch([], layer)  # the rhythm is measured
    residency.prefetch([Guess(0, 0, 1.0)], LAYERS - 1)
    assert not residency.is_resident(0)
    residency.ahead.schedule.deadline = False
    residency.prefetch([Guess(0, 0, 1.0)], LAYERS - 1)
    assert residency.is_resident(0)


def test_a_queued_prefetch_that_is_not_wanted_is_taken_back() -> None:
    residency = build(LAYERS * 3)
    residency.transfers.pace = Pace(gbps=1e-4, latency_us=0.0)
    residency.prefetch([Guess(0, e, 0.9) for e in range(3)], -1)
    residency._tickets[0].done.wait()
    lease = hold(residency, 0, [5])
    assert not residency.is_resident(2)  # its copy never started
    assert residency.take_counts().wasted_bytes <= 2 * residency.arena.codec.blob_bytes
    residency.release(lease)


@pytest.mark.parametrize("eviction", ["plec", "finemoe"])
def test_what_a_predictor_names_stays_until_its_layer_is_reached(eviction: str) -> None:
    residency = build(6, "global", eviction)
    residency.release(hold(residency, 1, [0, 1, 2, 3]))  # eids 6 to 9
    residency.prefetch([Guess(1, 0, 0.7)], -1)
    assert (residency.hints.predicted[6], residency.hints.probability[6]) == (True, 0.7)
    assert residency.hints.probability[7] < 1e-3
    residency.release(hold(residency, 0, [0, 1, 2, 3, 4]))  # takes the free slots, then the places of three
    assert [residency.is_resident(e) for e in range(6, 10)] == [True, False, False, False]
    residency.release(hold(residency, 1, [5]))
    assert not residency.hints.predicted.any() and (residency.hints.probability == 1).all()
    residency.check_integrity()


def test_changing_the_policy_keeps_who_was_used_last() -> None:
    residency = build(LAYERS * 4)
    for step, expert in enumerate([0, 1, 2, 3]):
        residency.now = step
        residency.release(hold(residency, 0, [expert]))
    residency.reshape(slots=LAYERS * 2)
    assert [residency.is_resident(e) for e in range(4)] == [False, False, True, True]
    residency.reshape(scope="global", make_policy=lambda roster: create("eviction", "lfu", {}, roster=roster))
    assert [residency.is_resident(e) for e in range(4)] == [False, False, True, True]
    residency.check_integrity()


@pytest.mark.parametrize("scope", ["layer", "global"])
def test_a_fresh_cache_is_filled_and_what_is_used_then_stays(scope: str) -> None:
    residency = build(LAYERS * 2, scope)
    residency.fill()
    residency.check_integrity()
    resident = [[residency.is_resident(layer * EXPERTS + e) for e in range(3)] for layer in range(LAYERS)]
    assert resident == [[True, True, False]] * LAYERS
    lease = hold(residency, 0, [1, 5])
    assert {h.expert: h.outcome for h in lease.held} == {1: Outcome.HIT, 5: Outcome.MISS}
    residency.release(lease)
    assert residency.take_counts().demand_bytes == residency.arena.codec.blob_bytes  # filling is not counted as demand


def test_a_failed_prefetch_is_never_computed_from_and_can_be_fetched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    residency = build(LAYERS * 3)
    with monkeypatch.context() as patched:
        patched.setattr(residency.transfers, "_fetch", lambda eid, slot: 1 / 0)
        residency.prefetch([Guess(0, 4, 0.9)], -1)
        residency._tickets[4].done.wait()
    assert residency.places()[4] == 1  # in flight, and no further
    residency.arrive(0, [4])
    held = residency.acquire(0, [4]).held[0]
    assert held.ticket is not None
    with pytest.raises(RuntimeError, match="copy of expert weights failed"):
        residency.transfers.wait(held.ticket)
    residency.abandon()
    residency.check_integrity()
    assert not residency.is_resident(4)
    residency.release(hold(residency, 0, [4]))  # its bytes are checked there
