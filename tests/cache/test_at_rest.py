"""Experts at rest are computed without a lease, and count as with one: the policy, the guard and the segments are the
same, and where anything would have to be fetched, waited for, counted as prefetched or evicted, there are none."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.cache.expert_cache import ExpertCache
from core.policy.predict import Prediction
from core.types import Outcome
from tests.cache.machine import EXPERTS, LAYERS, build, hold
from tests.selection import layered

PASSES = st.lists(
    st.lists(st.lists(st.integers(0, EXPERTS - 1), min_size=1, max_size=3, unique=True), min_size=1, max_size=LAYERS),
    min_size=1,
    max_size=6,
)


def state_of(cache: ExpertCache) -> tuple[object, ...]:
    """All that later decisions go by, and what was counted."""
    guard, core = cache.prefetch_queue.guard, cache.core
    rates = [guard.rate(eid) for eid in range(LAYERS * EXPERTS)]
    counts = cache.counts.figures()
    return (
        core.policy.score.tolist(),
        core.last_used.tolist(),
        core.tick,
        core.layer,
        rates,
        counts,
        bytes(cache.places()),
    )


@pytest.mark.parametrize("eviction", layered(["lru", "lfu", "lcp", "plec"], quick=lambda name: name in ("lru", "lcp")))
@given(passes=PASSES)
def test_it_counts_as_a_lease(eviction: str, passes: list[list[list[int]]]) -> None:
    leased, rested = (build(LAYERS * 4, eviction=eviction) for _ in range(2))
    for one in passes:
        for cache in (leased, rested):
            cache.begin_pass("decode", 1)
        for layer, wanted in enumerate(one):
            lease = hold(leased, layer, wanted)
            segments = rested.at_rest(layer, wanted)
            if segments is None:
                rested.release(hold(rested, layer, wanted))
            else:
                assert [one.expert for one in segments] == wanted == [one.expert for one in lease.segments]
                assert all(one.outcome == Outcome.HIT and one.ticket is None for one in [*segments, *lease.segments])
                assert [one.slots for one in segments] == [rested.core.table[layer * EXPERTS + e] for e in wanted]
            leased.release(lease)
        assert state_of(leased) == state_of(rested)
    rested.check_integrity()


def rested(eviction: str = "lru") -> ExpertCache:
    """A cache whose layer 0 has 0, 1 and 2 at rest."""
    cache = build(LAYERS * 3, eviction=eviction)
    for _ in range(2):  # the second request finds them there
        cache.release(hold(cache, 0, [0, 1, 2]))
    return cache


def test_only_where_all_are_at_rest_and_nothing_was_prefetched() -> None:
    cache = rested()
    assert cache.at_rest(0, [2, 0]) is not None
    assert cache.at_rest(0, [0, 3]) is None, "one is missing"
    assert cache.at_rest(0, [0, 0]) is None, "one twice"
    assert not cache.core.leased
    cache.prefetch([Prediction(1, 4, 0.9)], 0)
    assert cache.at_rest(0, [0, 1]) is None, "a prefetch has yet to be used or counted as wasted"


def test_never_where_experts_leave_after_their_step() -> None:
    assert rested("none").at_rest(0, [0]) is None
