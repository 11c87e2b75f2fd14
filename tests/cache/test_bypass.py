"""Experts that are computed in slots set aside for bypass, and not kept."""

import pytest

from core.cache.expert_cache import ExpertCache
from core.policy.allocation.slot_allocation import place
from core.settings.cache import CacheSettings
from core.settings.param import Choice
from core.settings.pins import Pins
from core.types import Outcome
from tests.cache.machine import EXPERTS, LAYERS, build, hold

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
