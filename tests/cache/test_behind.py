"""Experts that the host computes: admitted behind it, or left; the cache stays sound."""

import functools
from collections.abc import Collection, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.cache.expert_cache import ExpertCache
from core.cache.requests import MOST_BEHIND
from core.memory.link import Pace
from core.memory.transfer import TransferEngine
from core.types import Outcome
from tests.cache.machine import EXPERTS, LAYERS, build, check_bytes

K = 2


def everything(residents: int, missing: Sequence[int]) -> Collection[int]:
    return missing


def link(cache: ExpertCache) -> TransferEngine:
    assert isinstance(cache.copies.link, TransferEngine)
    return cache.copies.link


def settled(cache: ExpertCache) -> None:
    for ticket in [*cache.copies.tickets.values()]:
        link(cache).wait(ticket)


def test_what_the_host_computes_is_a_miss_without_a_slot_and_is_cached_behind() -> None:
    cache = build(2 * LAYERS)
    lease = cache.acquire(0, [1, 2], everything)
    assert not lease.segments and [one.expert for one in lease.hosted] == [1, 2]
    assert [one.outcome for one in lease.requests] == [Outcome.MISS] * 2
    assert cache.counts.demand_bytes == 0 and not cache.copies.tickets
    cache.release(lease)
    assert cache.counts.host_computed == cache.counts.host_admitted == 2
    assert cache.counts.admitted_bytes == 2 * cache.copies.expert_bytes
    settled(cache)
    lease = cache.acquire(0, [1, 2], everything)
    assert [one.outcome for one in lease.requests] == [Outcome.HIT] * 2 and not lease.hosted
    check_bytes(cache, lease)
    cache.release(lease)
    cache.check_integrity()


def test_of_a_layer_some_are_copied_and_others_left() -> None:
    cache = build(3 * LAYERS)
    seen: list[tuple[int, list[int]]] = []

    def last(residents: int, missing: Sequence[int]) -> Collection[int]:
        seen.append((residents, [*missing]))
        return missing[-1:]

    lease = cache.acquire(0, [0, 3, 5], last)
    assert seen == [(0, [0, 3, 5])]
    assert [one.expert for one in lease.segments] == [0, 3] and [one.expert for one in lease.hosted] == [5]
    settled(cache)
    check_bytes(cache, lease)
    cache.release(lease)
    cache.check_integrity()


def test_a_link_that_is_behind_admits_no_more() -> None:
    cache = build(EXPERTS * LAYERS)
    link(cache).pace = Pace(1e-9, 0.0)  # nothing lands
    lease = cache.acquire(0, [*range(EXPERTS)], everything)
    cache.release(lease)
    assert cache.counts.host_admitted == MOST_BEHIND < cache.counts.host_computed == EXPERTS
    lease = cache.acquire(0, [*range(EXPERTS)], everything)
    assert len(lease.hosted) == EXPERTS, "what has not landed is computed by the host again"
    cache.release(lease)
    assert cache.counts.host_admitted == MOST_BEHIND, "nothing is copied twice"
    link(cache).pace = Pace(0.0, 0.0)


def test_of_a_whole_token_that_the_host_took_part_in_each_miss_is_copied_once() -> None:
    """As layer by layer: the same requests, and the same experts afterwards."""
    routed = [[1, 2], [0, 3], *[[4, 5]] * (LAYERS - 2)]
    caches = [build(2 * LAYERS) for _ in range(2)]
    for cache, whole in zip(caches, (False, True), strict=True):
        if whole:
            requests, submitted = cache.requests.replay(routed, lambda eid: False, hosted=True)
            assert submitted == [] and [len(of or ()) for of in requests] == [2] * LAYERS
        for layer, chosen in enumerate([] if whole else routed):
            lease = cache.acquire(layer, chosen, everything)
            cache.release(lease)
            settled(cache)
        assert cache.counts.host_computed == cache.counts.host_admitted == 2 * LAYERS
        assert cache.counts.demand_bytes == 0
        assert cache.counts.admitted_bytes == 2 * LAYERS * cache.copies.expert_bytes
        settled(cache)
        cache.check_integrity()
    first, second = ([[*cache.core.residents(pool)] for pool in cache.core.pools] for cache in caches)
    assert [*map(sorted, first)] == [*map(sorted, second)]
    requests, _ = caches[1].requests.replay(routed, lambda eid: True, hosted=True)
    assert all(of is not None and [one.outcome for one in of] == [Outcome.HIT] * 2 for of in requests)
    assert caches[1].counts.host_computed == 2 * LAYERS


@pytest.mark.parametrize("hosted", [False, True])
def test_what_was_in_a_slot_is_looked_up_by_the_next_token(hosted: bool) -> None:
    cache = build(2 * LAYERS)
    replay = functools.partial(cache.requests.replay, hosted=hosted)
    replay([[1, 2]] * LAYERS, lambda eid: False)
    settled(cache)
    for eid in [*cache.copies.tickets]:
        cache.copies.pending(eid)
    first, _ = replay([[1, 2]] * LAYERS, lambda eid: True)
    again, _ = replay([[2, 1]] * LAYERS, lambda eid: True)
    assert None not in first and again == [None] * LAYERS
    replay([[1, 5]], lambda eid: eid == 1)  # 5 takes the slot of 2
    settled(cache)
    requests, _ = replay([[2, 5], [1, 2]], lambda eid: True)  # as they were when that token began
    assert requests[0] is not None and requests[1] is None
    assert [one.outcome for one in requests[0]] == [Outcome.HIT] * 2
    cache.check_integrity()


def test_while_the_copies_of_earlier_tokens_are_behind_none_is_added() -> None:
    cache = build(EXPERTS * LAYERS)
    link(cache).pace = Pace(1e-9, 0.0)  # nothing lands
    cache.requests.replay([[*range(EXPERTS)]], lambda eid: False, hosted=True)
    first = cache.counts.host_admitted
    assert first == EXPERTS > MOST_BEHIND
    cache.requests.replay([[], [*range(EXPERTS)]], lambda eid: False, hosted=True)
    assert cache.counts.host_admitted == first and cache.counts.host_computed == 2 * EXPERTS
    link(cache).pace = Pace(0.0, 0.0)


def test_a_newcomer_that_the_policy_ranks_lowest_gets_no_slot() -> None:
    cache = build(2 * LAYERS, eviction="lfu")
    for _ in range(3):
        lease = cache.acquire(0, [0, 1])
        settled(cache)
        cache.release(lease)
    lease = cache.acquire(0, [2], everything)
    cache.release(lease)
    assert cache.counts.host_admitted == 0 and cache.is_resident(0) and cache.is_resident(1)
    cache.check_integrity()


def test_a_demand_for_what_is_copied_behind_waits_for_it() -> None:
    cache = build(2 * LAYERS)
    cache.release(cache.acquire(0, [4], everything))
    lease = cache.acquire(0, [4])
    for one in lease.segments:
        if one.ticket is not None:
            link(cache).wait(one.ticket)
    check_bytes(cache, lease)
    cache.release(lease)
    cache.check_integrity()


@pytest.mark.parametrize("transit", [0, 2])
@given(
    steps=st.lists(
        st.tuples(
            st.integers(0, LAYERS - 1),
            st.lists(st.integers(0, EXPERTS - 1), min_size=1, max_size=2, unique=True),
            st.integers(0, 2),
            st.sampled_from(["lru", "lfu", "none"]),
        ),
        max_size=25,
    )
)
def test_any_history_keeps_the_cache_sound(transit: int, steps: list[tuple[int, list[int], int, str]]) -> None:
    caches = {name: build(2 * LAYERS + transit, eviction=name, transit=transit) for name in ("lru", "lfu", "none")}
    for layer, wanted, left, name in steps:
        cache = caches[name]
        lease = cache.acquire(layer, wanted, lambda residents, missing, left=left: [*missing][:left])  # type: ignore[misc]
        assert {one.expert for one in lease.requests} == {*wanted}
        for one in lease.segments:
            if one.ticket is not None:
                link(cache).wait(one.ticket)
        check_bytes(cache, lease)
        cache.release(lease)
        cache.check_integrity()
    for cache in caches.values():
        settled(cache)
        cache.check_integrity()
        link(cache).close()
