"""Leases, hints to the policy, and changes of policy and size: case by case."""

import numpy as np
import pytest

from core.policy.predict import LayerMap, Prediction
from core.settings.registry import create, variants
from core.types import Outcome
from tests.cache.machine import EXPERTS, LAYERS, build, hold

K = 2
NAMES = [v.name for v in variants("eviction")]


def test_a_leased_expert_is_never_evicted() -> None:
    expert_cache = build(LAYERS * K)
    lease = hold(expert_cache, 0, [0, 1])
    with pytest.raises(RuntimeError, match="more slots"):
        expert_cache.acquire(0, [2])
    assert expert_cache.is_resident(0)
    assert expert_cache.is_resident(1)
    expert_cache.release(lease)


def test_a_predicted_expert_stays_until_its_layer_is_reached() -> None:
    expert_cache = build(6, "global", "plec")
    expert_cache.release(hold(expert_cache, 1, [0, 1, 2, 3]))  # eids 6 to 9
    expert_cache.prefetch([Prediction(1, 0, 0.7)], -1)
    assert expert_cache.hints.predicted[6]
    expert_cache.release(hold(expert_cache, 0, [0, 1, 2, 3, 4]))  # takes the free slots, then those of three
    assert [expert_cache.is_resident(e) for e in range(6, 10)] == [True, False, False, False]
    expert_cache.release(hold(expert_cache, 1, [5]))
    assert not expert_cache.hints.predicted.any()
    expert_cache.check_integrity()


def test_a_map_orders_a_whole_layer_until_a_newer_one_of_it() -> None:
    expert_cache = build(5, "global", "finemoe")
    expert_cache.release(hold(expert_cache, 1, [0, 1, 2, 3]))  # eids 6 to 9, one visit each
    expert_cache.prefetch([], -1, [LayerMap(1, np.array([0.4, 0.3, 0.1, 0.05, 0.08, 0.07], np.float32))])
    expert_cache.release(hold(expert_cache, 0, [0, 1]))  # a free slot, then the one of the unlikeliest
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


def test_changing_the_policy_keeps_the_most_recently_used() -> None:
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
def test_a_fresh_cache_is_filled_and_used_experts_stay(scope: str) -> None:
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
