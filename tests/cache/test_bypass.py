"""Experts that are computed in slots set aside for bypass, and not kept."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.cache.expert_cache import ExpertCache
from core.policy.allocation.slot_allocation import place
from core.policy.predict import Prediction
from core.policy.prefetch.guard import KEEP, MARGIN, PrefetchGuard
from core.settings.cache import CacheSettings
from core.settings.param import Choice
from core.settings.pins import Pins
from core.settings.prefetch import PrefetchSettings
from core.types import Outcome
from tests.cache.machine import EXPERTS, LAYERS, build, hold, landed, residents, use
from tests.selection import examples

K = 2


def three_kept(transit: int = K) -> ExpertCache:
    """Layer 0 has three slots: 0 and 1 are used five times, 2 three times."""
    cache = build(LAYERS * 3 + transit, "layer", "lfu", transit=transit)
    use(cache, 0, 0, 1, times=5)
    use(cache, 0, 2, times=3)
    return cache


def test_a_newcomer_with_a_lower_score_than_all_residents_is_computed_and_not_kept() -> None:
    cache = three_kept()
    assert len(cache.arena) == LAYERS * 3 + K and [pool.capacity for pool in cache.core.pools] == [3] * LAYERS
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


def test_without_it_the_same_experts_displace_others() -> None:
    cache = three_kept(0)
    use(cache, 0, 4, 5)
    assert residents(cache, 0) == [1, 4, 5]
    assert cache.take_counts().bypassed == 0


def test_without_slots_set_aside_nothing_counts_as_bypassed() -> None:
    cache = build(LAYERS * 3, "layer", "none")
    use(cache, 0, 0, 1)
    assert residents(cache, 0) == [] and cache.take_counts().bypassed == 0, "the policy retains none"


@pytest.mark.parametrize("name", ["lru", "fifo"])
def test_where_the_newest_score_highest_nothing_is_bypassed(name: str) -> None:
    cache = build(LAYERS * 3 + K, "layer", name, transit=K)
    for wanted in ((0, 1), (2,), (4, 5)):
        use(cache, 0, *wanted)
    assert residents(cache, 0) == [2, 4, 5]
    assert cache.take_counts().bypassed == 0


def test_all_layers_share_the_slots_set_aside() -> None:
    cache = build(LAYERS * K + K, "layer", "lfu", transit=K)
    for layer in range(LAYERS):
        use(cache, layer, 0, 1, times=4)
    for layer in range(LAYERS):
        use(cache, layer, 2, 3)
        assert residents(cache, layer) == [0, 1]
    assert cache.take_counts().bypassed == 2 * LAYERS


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


def test_passes_that_break_off_or_measure_give_back_borrowed_slots() -> None:
    cache = three_kept()
    reservation = cache.reserve_slots(K)
    use(cache, 0, 4, 5)
    cache.restore(reservation, lambda: False)
    cache.check_integrity()
    assert residents(cache, 0) == [0, 1, 2] and cache.take_counts().bypassed == 0
    hold(cache, 0, [4, 5])
    assert len(residents(cache, 0)) == 5
    cache.abandon()
    cache.check_integrity()
    assert residents(cache, 0) == [0, 1, 2]


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


def test_a_budget_that_pays_for_too_few_slots_is_refused() -> None:
    placed = place(CacheSettings(bypass=True), LAYERS, EXPERTS, K, None)
    assert "Bypass sets 2 slots aside" in placed.problem(LAYERS * K + K - 1)
    assert placed.problem(LAYERS * K + K) == ""
    assert place(CacheSettings(bypass=True, scope="global"), LAYERS, EXPERTS, K, None).problem(K) == ""
    pinned = place(CacheSettings(bypass=True, pins=Pins.parse("0:0")), LAYERS, EXPERTS, K, None)
    assert "pinned" in pinned.problem(LAYERS * K + K)


def hot_and_cold(eviction: str = "lru", *, guard: bool = True) -> ExpertCache:
    """Layer 1 has two slots: expert 0 is used by every second token, 1 was used once, ten tokens ago; to LRU, 0 is the
    older one."""
    cache = build(LAYERS * 2, "layer", eviction)
    cache.prefetch_queue.configure(None, PrefetchSettings(guard=guard))
    use(cache, 1, 0, times=10)
    use(cache, 0, 0, times=9)
    use(cache, 1, 1)
    return cache


def prefetch(cache: ExpertCache, score: float, *experts: int) -> list[int]:
    """Prefetch experts of layer 1, by default 2, while layer 0 is computed -> the residents of layer 1 then."""
    cache.prefetch([Prediction(1, expert, score) for expert in experts or (2,)], 0)
    landed(cache)
    cache.check_integrity()
    return residents(cache, 1)


@pytest.mark.parametrize(
    ("eviction", "guard", "score", "left"),
    [
        ("lru", True, 0.01, [0, 1]),
        ("lru", False, 0.01, [1, 2]),
        ("lru", True, 1.0, [1, 2]),  # a certain one
        ("lfu", True, 0.06, [0, 1]),  # LFU gives 1 the lowest score; one use in 20 passes: not half again as likely
        ("lfu", True, 0.2, [0, 2]),
    ],
)
def test_a_prefetch_displaces_who_is_clearly_less_likely(
    eviction: str, guard: bool, score: float, left: list[int]
) -> None:
    cache = hot_and_cold(eviction, guard=guard)
    assert prefetch(cache, score) == left
    assert cache.take_counts().prefetch_issued == (2 in left)
    assert use(cache, 1, 2) == [Outcome.PREFETCH_HIT if 2 in left else Outcome.MISS]


def test_a_free_slot_needs_no_permission() -> None:
    cache = build(LAYERS * 3)
    use(cache, 1, 0, 1, times=5)
    assert prefetch(cache, 0.01) == [0, 1, 2]


def test_an_expert_that_the_policy_does_not_retain_is_worth_nothing() -> None:
    cache = build(LAYERS * 2, "layer", "none")
    use(cache, 1, 0, times=10)
    assert prefetch(cache, 0.9, 0, 1) == [0, 1]
    use(cache, 1, 1)  # 0 was wasted, and stays until a slot is needed
    assert prefetch(cache, 0.01, 4, 5) == [4, 5]


def test_the_score_that_a_prefetch_must_exceed() -> None:
    guard = PrefetchGuard(3)
    assert guard.rate(0) == 0.0 and guard.may_displace(0.01, 0)
    for _ in range(4):
        guard.begin_pass()
        guard.used([0])
    assert guard.rate(0) == pytest.approx(1.0), "of all passes so far, few as they are"
    guard.used([1])
    assert guard.rate(1) == pytest.approx((1 - KEEP) / (1 - KEEP**4))
    before, share = guard.rate(0), guard.rate(1)
    guard.begin_pass()
    assert guard.rate(0) < before and guard.rate(1) < share
    least = MARGIN * guard.rate(1)
    assert not guard.may_displace(least, 1) and guard.may_displace(least + 1e-9, 1)
    assert not guard.may_displace(0.999, 0) and guard.may_displace(1.0, 0), "a certain one always may"
    guard.on = False
    assert guard.may_displace(0.001, 0)
    guard.forget()
    assert guard.rate(0) == 0.0


@examples(60)
@given(passes=st.lists(st.sets(st.integers(0, 4)), min_size=1, max_size=80))
def test_a_rate_is_the_faded_mean_of_the_passes(passes: list[set[int]]) -> None:
    guard = PrefetchGuard(5)
    for used in passes:
        guard.begin_pass()
        guard.used(sorted(used))
    weights = [KEEP**age for age in reversed(range(len(passes)))]
    for eid in range(5):
        mean = sum(w for w, used in zip(weights, passes, strict=True) if eid in used) / sum(weights)
        assert guard.rate(eid) == pytest.approx(mean)
        assert 0.0 <= guard.rate(eid) <= 1.0


def test_changing_the_setting_acts_and_measuring_passes_leave_no_trace() -> None:
    cache = hot_and_cold()
    before = [cache.prefetch_queue.guard.rate(eid) for eid in range(LAYERS * EXPERTS)]
    reservation = cache.reserve_slots(1)
    use(cache, 1, 5, times=3)
    cache.restore(reservation, lambda: False)
    assert [cache.prefetch_queue.guard.rate(eid) for eid in range(LAYERS * EXPERTS)] == before
    cache.prefetch_queue.configure(PrefetchSettings(), PrefetchSettings(guard=False))
    assert prefetch(cache, 0.01) == [1, 2]
    cache.start_over()
    assert cache.prefetch_queue.guard.rate(EXPERTS) == 0.0
