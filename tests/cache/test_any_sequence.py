"""The cache under any sequence of what can happen to it: nothing lost, nothing shared, nothing wrong in a slot."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from core.cache.expert_cache import ExpertCache
from core.memory.link import Pace
from core.policy.predict import Prediction
from core.settings.prefetch import PrefetchSettings
from core.settings.registry import create, variants
from core.types import Outcome, Residence
from tests.cache.machine import EXPERTS, LAYERS, build, hold
from tests.selection import examples

K = 2
NAMES = [v.name for v in variants("eviction")]
distinct = st.lists(st.integers(0, EXPERTS - 1), min_size=1, max_size=K, unique=True)


class Cache(RuleBasedStateMachine):
    """Random layers, prefetches, resizes and policy changes over real copies."""

    expert_cache: ExpertCache
    least: int  # slots

    @initialize(
        slots=st.integers(LAYERS * K, LAYERS * EXPERTS),
        scope=st.sampled_from(["layer", "global"]),
        eviction=st.sampled_from(NAMES),
        paced=st.booleans(),
        transit=st.sampled_from([0, K, K + 1]),
    )
    def start(self, slots: int, scope: str, eviction: str, paced: bool, transit: int) -> None:
        self.least = LAYERS * K + transit
        self.expert_cache = build(max(slots, self.least), scope, eviction, transit)
        if paced:
            self.expert_cache.copies.link.pace = Pace(5.0, 1.0)

    @rule(layer=st.integers(0, LAYERS - 1), wanted=distinct)
    def compute(self, layer: int, wanted: list[int]) -> None:
        self.expert_cache.begin_pass("decode", 1)
        before = [self.expert_cache.is_resident(layer * EXPERTS + e) for e in wanted]
        lease = hold(self.expert_cache, layer, wanted)
        outcomes = {h.expert: h.outcome for h in lease.segments}
        assert all(outcomes[e] == Outcome.MISS for e, there in zip(wanted, before, strict=True) if not there)
        self.expert_cache.release(lease)

    @rule(
        predictions=st.lists(
            st.tuples(st.integers(0, LAYERS - 1), st.integers(0, EXPERTS - 1)), max_size=6, unique=True
        ),
        score=st.floats(0, 1),
        at=st.integers(-1, LAYERS - 1),
    )
    def prefetch(self, predictions: list[tuple[int, int]], score: float, at: int) -> None:
        named = [Prediction(layer, expert, score / (1 + i)) for i, (layer, expert) in enumerate(predictions)]
        queue = self.expert_cache.prefetch_queue
        before = set(queue.fresh)
        self.expert_cache.prefetch(named, at)
        for eid, ticket in queue.fresh.items():
            if queue.guard.on and self.expert_cache.policy.retains and eid not in before and ticket.displaced >= 0:
                assert queue.guard.may_displace(ticket.score, ticket.displaced)

    @rule(
        passes=st.lists(st.tuples(st.integers(0, LAYERS - 1), distinct), max_size=8),
        patience=st.one_of(st.none(), st.integers(0, LAYERS * EXPERTS)),
        least=st.integers(1, EXPERTS),
    )
    def reserve(self, passes: list[tuple[int, list[int]]], patience: int | None, least: int) -> None:
        """Passes over reserved slots leave everything as it was; some experts are gone if restoring them is stopped."""
        cache, calls = self.expert_cache, 0

        def stop() -> bool:
            nonlocal calls
            calls += 1
            return patience is not None and calls > patience

        cache.core.empty_buffer()
        while not cache.quiet():
            pass
        before, policy, counts = cache.places(), cache.policy, cache.counts
        scores, fresh, book = (
            policy.score.copy(),
            set(cache.prefetch_queue.fresh),
            (cache.core.tick, cache.core.now, cache.core.layer),
        )
        reservation = cache.reserve_slots(least)
        cache.check_integrity()
        for layer, wanted in passes:
            cache.core.now += 1
            cache.release(hold(cache, layer, wanted))
        cache.restore(reservation, stop)
        assert (cache.core.tick, cache.core.now, cache.core.layer) == book
        assert cache.policy is policy
        assert cache.counts is counts
        stayed = [eid for eid, place in enumerate(before) if place == Residence.RESIDENT and cache.is_resident(eid)]
        assert (policy.score[stayed] == scores[stayed]).all()
        if patience is None:
            assert cache.places() == before
            assert set(cache.prefetch_queue.fresh) == fresh
        assert not any(cache.is_resident(eid) for eid, place in enumerate(before) if place != Residence.RESIDENT)

    @rule(on=st.booleans())
    def deadline(self, on: bool) -> None:
        self.expert_cache.prefetch_queue.schedule.deadline = on

    @rule(on=st.booleans())
    def guard(self, on: bool) -> None:
        self.expert_cache.prefetch_queue.guard.on = on

    @rule(beside=st.booleans())
    def prefetch_by(self, beside: bool) -> None:
        """Prefetches of the other kind end; residents stay, but those that were still to be copied."""
        cache = self.expert_cache
        fresh, before = {*cache.prefetch_queue.fresh}, {*cache.core.held.sizes()}
        cache.prefetch_by(None, PrefetchSettings(beside=beside))
        assert cache.prefetch_queue.to_buffer == (beside and cache.placement.transit > 0)
        assert before - fresh <= {*cache.core.held.sizes()} <= before

    @rule(slots=st.integers(LAYERS * K, LAYERS * EXPERTS))
    def resize(self, slots: int) -> None:
        slots = max(slots, self.least)
        self.expert_cache.reshape(slots=slots)
        assert len(self.expert_cache.arena) == slots

    @rule(scope=st.sampled_from(["layer", "global"]), eviction=st.sampled_from(NAMES))
    def change(self, scope: str, eviction: str) -> None:
        self.expert_cache.reshape(
            scope=scope, make_policy=lambda expert_index: create("eviction", eviction, {}, expert_index=expert_index)
        )

    @invariant()
    def sound(self) -> None:
        self.expert_cache.check_integrity()

    def teardown(self) -> None:
        if hasattr(self, "expert_cache"):
            self.expert_cache.copies.link.close()
            self.expert_cache.clear()
            assert len(self.expert_cache.arena) == 0


TestCache = Cache.TestCase
TestCache.settings = settings(examples(60), stateful_step_count=30)
