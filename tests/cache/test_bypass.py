"""Experts that are computed and not kept: in slots set aside for bypass, or by the host; the cache stays sound."""

from collections.abc import Collection, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.cache.expert_cache import ExpertCache
from core.cache.requests import MOST_BEHIND
from core.memory.link import Pace
from core.memory.transfer import TransferEngine
from core.policy.allocation.slot_allocation import place
from core.settings.cache import CacheSettings
from core.settings.param import Choice
from core.settings.pins import Pins
from core.types import Outcome
from tests.cache.machine import EXPERTS, LAYERS, build, check_bytes, hold

K = 2


def use(cache: ExpertCache, layer: int, *wanted: int, times: int = 1) -> list[Outcome]:
    """A token's experts in one layer -> the outcome of each, in order."""
    for _ in range(times):
        cache.begin_pass("decode", 1)
        lease = hold(cache, layer, list(wanted))
        outcomes = {leased.expert: leased.outcome for leased in lease.segments}
        cache.release(lease)
        cache.check_integrity()
    return [outcomes[expert] for expert in wanted]


def residents(cache: ExpertCache, layer: int) -> list[int]:
    return [expert for expert in range(EXPERTS) if cache.is_resident(layer * EXPERTS + expert)]


def test_a_newcomer_with_a_lower_score_than_all_residents_is_computed_and_not_kept() -> None:
    cache = build(LAYERS * 3 + K, "layer", "lfu", transit=K)
    assert len(cache.arena) == LAYERS * 3 + K and [pool.capacity for pool in cache.core.pools] == [3] * LAYERS
    use(cache, 0, 0, 1, times=5)
    use(cache, 0, 2, times=3)
    assert use(cache, 0, 4, 5) == [Outcome.MISS] * 2
    assert residents(cache, 0) == [0, 1, 2]
    assert cache.take_counts().bypassed == 2
    assert use(cache, 0, 4) == [Outcome.MISS], "used twice now, 2 three times"
    assert residents(cache, 0) == [0, 1, 2]
    assert use(cache, 0, 4) == [Outcome.MISS], "as often as 2, and later"
    assert residents(cache, 0) == [0, 1, 4]
    assert use(cache, 0, 4) == [Outcome.HIT]
    assert cache.take_counts().bypassed == 1
    assert len(cache.arena) == LAYERS * 3 + K
    cache.copies.link.close()


def test_without_it_the_same_experts_displace_others() -> None:
    cache = build(LAYERS * 3, "layer", "lfu")
    use(cache, 0, 0, 1, times=5)
    use(cache, 0, 2, times=3)
    use(cache, 0, 4, 5)
    assert residents(cache, 0) == [1, 4, 5]
    assert cache.take_counts().bypassed == 0
    cache.copies.link.close()


def test_without_slots_set_aside_nothing_counts_as_bypassed() -> None:
    cache = build(LAYERS * 3, "layer", "none")
    use(cache, 0, 0, 1)
    assert residents(cache, 0) == [] and cache.take_counts().bypassed == 0, "the policy retains none"
    cache.copies.link.close()


@pytest.mark.parametrize("name", ["lru", "fifo"])
def test_where_the_newest_score_highest_nothing_is_bypassed(name: str) -> None:
    cache = build(LAYERS * 3 + K, "layer", name, transit=K)
    for wanted in ((0, 1), (2,), (4, 5)):
        use(cache, 0, *wanted)
    assert residents(cache, 0) == [2, 4, 5]
    assert cache.take_counts().bypassed == 0
    cache.copies.link.close()


def test_all_layers_share_the_slots_set_aside() -> None:
    cache = build(LAYERS * K + K, "layer", "lfu", transit=K)
    for layer in range(LAYERS):
        use(cache, layer, 0, 1, times=4)
    for layer in range(LAYERS):
        use(cache, layer, 2, 3)
        assert residents(cache, layer) == [0, 1]
    assert cache.take_counts().bypassed == 2 * LAYERS
    cache.copies.link.close()


def test_pinned_experts_stay_and_a_prompt_comes_in_waves() -> None:
    cache = build(LAYERS * 3 + K, "layer", "lfu", transit=K)
    cache.pin([0])
    use(cache, 0, 1, 2, times=4)
    first = hold(cache, 0, [3])
    second = hold(cache, 0, [4])
    third = cache.acquire(0, [5])  # no slot is left to borrow: it takes that of 1 or 2
    for lease in (first, second, third):
        for held in lease.segments:
            if held.ticket is not None:
                cache.copies.link.wait(held.ticket)
        cache.release(lease)
    cache.check_integrity()
    assert residents(cache, 0) == [0, 2, 5], "1 was evicted for 5; then 3 and 4, which score lower than 2"
    cache.copies.link.close()


def test_a_pass_that_breaks_off_gives_back_borrowed_slots() -> None:
    cache = build(LAYERS * 3 + K, "layer", "lfu", transit=K)
    use(cache, 0, 0, 1, times=5)
    use(cache, 0, 2, times=3)
    hold(cache, 0, [4, 5])
    assert len(residents(cache, 0)) == 5
    cache.abandon()
    cache.check_integrity()
    assert residents(cache, 0) == [0, 1, 2]
    cache.copies.link.close()


def test_other_passes_borrow_the_slots_and_leave_nothing_behind() -> None:
    cache = build(LAYERS * 3 + K, "layer", "lfu", transit=K)
    use(cache, 0, 0, 1, times=5)
    use(cache, 0, 2, times=3)
    reservation = cache.reserve_slots(K)
    use(cache, 0, 4, 5)
    cache.restore(reservation, lambda: False)
    cache.check_integrity()
    assert residents(cache, 0) == [0, 1, 2]
    assert cache.take_counts().bypassed == 0
    cache.copies.link.close()


def test_it_is_turned_on_and_off_between_two_passes() -> None:
    cache, off = build(LAYERS * 4, "layer", "lfu"), CacheSettings(eviction=Choice("lfu"))
    on = CacheSettings(eviction=Choice("lfu"), bypass=True)
    use(cache, 0, 0, 1, times=3)
    for old, new, sizes in ((off, on, [4, 3, 3]), (on, off, [4, 4, 4])):
        cache.configure(old, new, place(new, LAYERS, EXPERTS, K, None))
        cache.check_integrity()
        assert [pool.capacity for pool in cache.core.pools] == sizes
        assert len(cache.core.transit) == 12 - sum(sizes) and len(cache.arena) == 12
        assert {0, 1} <= set(residents(cache, 0))
    cache.configure(off, on, place(on, LAYERS, EXPERTS, K, None))
    cache.reshape(slots=LAYERS * EXPERTS)
    assert not cache.core.transit, "everything is resident anyway"
    cache.clear()
    assert len(cache.arena) == 0
    cache.copies.link.close()


def test_a_budget_that_pays_for_too_few_slots_is_refused() -> None:
    placed = place(CacheSettings(bypass=True), LAYERS, EXPERTS, K, None)
    assert "Bypass sets 2 slots aside" in placed.problem(LAYERS * K + K - 1)
    assert placed.problem(LAYERS * K + K) == ""
    assert place(CacheSettings(bypass=True, scope="global"), LAYERS, EXPERTS, K, None).problem(K) == ""
    pinned = place(CacheSettings(bypass=True, pins=Pins.parse("0:0")), LAYERS, EXPERTS, K, None)
    assert "pinned" in pinned.problem(LAYERS * K + K)


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
            requests, submitted = cache.requests.replay_hosted(routed, lambda eid: False)
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
    assert [residents(caches[0], layer) for layer in range(LAYERS)] == [
        residents(caches[1], layer) for layer in range(LAYERS)
    ]
    requests, _ = caches[1].requests.replay_hosted(routed, lambda eid: True)
    assert all(of is not None and [one.outcome for one in of] == [Outcome.HIT] * 2 for of in requests)
    assert caches[1].counts.host_computed == 2 * LAYERS


@pytest.mark.parametrize("hosted", [False, True])
def test_what_was_in_a_slot_is_looked_up_by_the_next_token(hosted: bool) -> None:
    cache = build(2 * LAYERS)
    replay = cache.requests.replay_hosted if hosted else cache.requests.replay
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
    cache.requests.replay_hosted([[*range(EXPERTS)]], lambda eid: False)
    first = cache.counts.host_admitted
    assert first == EXPERTS > MOST_BEHIND
    cache.requests.replay_hosted([[], [*range(EXPERTS)]], lambda eid: False)
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
