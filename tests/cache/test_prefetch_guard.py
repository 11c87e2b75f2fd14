"""Which residents a prefetch may evict, and the rule without the guard as the control."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.cache.expert_cache import ExpertCache
from core.policy.predict import Prediction
from core.policy.prefetch.guard import KEEP, MARGIN, PrefetchGuard
from core.settings.prefetch import PrefetchSettings
from core.types import Outcome
from tests.cache.machine import EXPERTS, LAYERS, build
from tests.cache.test_bypass import residents, use
from tests.cache.test_prefetches import landed
from tests.selection import examples


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


def test_an_unlikely_prefetch_does_not_evict_a_hot_resident() -> None:
    cache = hot_and_cold()
    assert prefetch(cache, 0.01) == [0, 1]
    assert cache.take_counts().prefetch_issued == 0
    assert use(cache, 1, 0) == [Outcome.HIT]
    cache.copies.link.close()


def test_without_the_guard_it_evicts_the_hot_one() -> None:
    cache = hot_and_cold(guard=False)
    assert prefetch(cache, 0.01) == [1, 2]
    assert use(cache, 1, 0) == [Outcome.MISS]
    cache.copies.link.close()


def test_a_likely_prefetch_evicts_a_cold_resident() -> None:
    cache = hot_and_cold("lfu")  # which gives 1 the lowest score
    assert prefetch(cache, 0.06) == [0, 1], "one use in 20 passes: not half again as likely"
    assert prefetch(cache, 0.2) == [0, 2]
    assert use(cache, 1, 2) == [Outcome.PREFETCH_HIT]
    cache.copies.link.close()


def test_a_certain_prefetch_evicts_even_a_hot_resident() -> None:
    cache = hot_and_cold()
    assert prefetch(cache, 1.0) == [1, 2]
    cache.copies.link.close()


def test_a_free_slot_needs_no_permission() -> None:
    cache = build(LAYERS * 3)
    use(cache, 1, 0, 1, times=5)
    assert prefetch(cache, 0.01) == [0, 1, 2]
    cache.copies.link.close()


def test_an_expert_that_the_policy_does_not_retain_is_worth_nothing() -> None:
    cache = build(LAYERS * 2, "layer", "none")
    use(cache, 1, 0, times=10)
    assert prefetch(cache, 0.9, 0, 1) == [0, 1]
    use(cache, 1, 1)  # 0 was wasted, and stays until a slot is needed
    assert prefetch(cache, 0.01, 4, 5) == [4, 5]
    cache.copies.link.close()


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
    cache.copies.link.close()
