"""Pinned experts and layers with unlike numbers of slots, over real copies; the simulator agrees about both."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.cache.expert_cache import ExpertCache
from core.policy.allocation.slot_allocation import Placement
from core.policy.predict import Prediction
from core.settings.registry import variants
from core.types import Outcome
from tests.cache.machine import EXPERTS, LAYERS, build, hold
from tests.selection import layered

K = 2
NAMES = [v.name for v in variants("eviction")]
OFTEN = ("lru", "lfu", "lcp", "finemoe", "random")
PINS = [0, 5, 7, 13]  # two of layer 0, one of each other
SIZES = [5, 3, 4]  # slots of each layer: pins and a token's experts fit


def unlike(name: str, sizes: list[int] = SIZES) -> ExpertCache:
    expert_cache = build(sum(sizes), eviction=name)
    expert_cache.place(replace(expert_cache.placement, pinned=frozenset(PINS), divide=lambda slots: sizes))
    expert_cache.reshape()
    expert_cache.pin(PINS)
    expert_cache.fill()
    return expert_cache


@pytest.mark.parametrize("name", layered(NAMES, quick=lambda name: name in OFTEN))
@given(
    steps=st.lists(st.tuples(st.integers(0, LAYERS - 1), st.permutations(range(EXPERTS)), st.booleans()), max_size=40)
)
@settings(max_examples=10)
def test_pinned_experts_stay_whatever_happens(name: str, steps: list[tuple[int, list[int], bool]]) -> None:
    expert_cache = unlike(name)
    for now, (layer, experts, ahead) in enumerate(steps):
        expert_cache.core.now = now
        lease = hold(expert_cache, layer, experts[:K])
        if ahead:
            expert_cache.prefetch([Prediction((layer + 1) % LAYERS, e, 0.9) for e in experts], layer)
        expert_cache.release(lease)
        assert all(expert_cache.is_resident(eid) for eid in PINS)
        expert_cache.check_integrity()
    expert_cache.copies.link.close()


def test_pins_are_loaded_at_once_and_counted() -> None:
    expert_cache = build(LAYERS * 3)
    expert_cache.fill()
    expert_cache.take_counts()
    expert_cache.pin([5, 0])  # 0 is there already
    size = expert_cache.arena.codec.blob_bytes
    assert expert_cache.is_resident(5) and expert_cache.take_counts().demand_bytes == size
    lease = hold(expert_cache, 0, [5, 4])
    assert {h.expert: h.outcome for h in lease.segments} == {5: Outcome.HIT, 4: Outcome.MISS}
    expert_cache.release(lease)
    for other in (1, 2, 3, 4, 1, 2, 3):  # one slot is left to all others
        expert_cache.release(hold(expert_cache, 0, [other]))
        assert expert_cache.is_resident(0) and expert_cache.is_resident(5)
    expert_cache.pin([])
    for other in (1, 2, 3):
        expert_cache.release(hold(expert_cache, 0, [other]))
    assert not expert_cache.is_resident(0) and not expert_cache.is_resident(5)


def test_a_pinned_expert_leaves_when_there_is_no_other_choice() -> None:
    expert_cache = build(LAYERS * K)
    expert_cache.pin([0, 1])
    expert_cache.release(hold(expert_cache, 0, [2, 3]))  # both slots of the layer are needed
    assert not expert_cache.is_resident(0) and not expert_cache.is_resident(1)
    expert_cache.prefetch([Prediction(1, 3, 0.9)], 0)
    expert_cache.check_integrity()


def test_a_prefetch_never_takes_a_pinned_slot() -> None:
    expert_cache = build(LAYERS * K)
    expert_cache.pin([6, 7])
    expert_cache.prefetch([Prediction(1, 3, 0.9), Prediction(1, 4, 0.8)], 0)
    assert expert_cache.is_resident(6) and expert_cache.is_resident(7)
    assert not expert_cache.is_resident(9) and not expert_cache.is_resident(10)


@pytest.mark.parametrize("change", [dict(slots=9), dict(scope="global"), dict(slots=LAYERS * EXPERTS)])
def test_pinned_experts_move_with_every_change_of_the_cache(change: dict[str, Any]) -> None:
    expert_cache = unlike("lru")
    expert_cache.place(replace(Placement.even(LAYERS, EXPERTS, K, "layer"), pinned=frozenset(PINS)))
    expert_cache.pin([0, 7])
    for other in (1, 2, 3):
        expert_cache.release(hold(expert_cache, 0, [other]))
    expert_cache.reshape(**change)
    assert expert_cache.is_resident(0) and expert_cache.is_resident(7)
    expert_cache.check_integrity()


def test_slots_move_between_layers_without_a_copy() -> None:
    expert_cache = build(LAYERS * 4)
    expert_cache.fill()
    expert_cache.take_counts()
    expert_cache.place(replace(expert_cache.placement, divide=lambda slots: [2, 4, slots - 6]))
    expert_cache.reshape()
    assert [expert_cache.pool(layer).capacity for layer in range(LAYERS)] == [2, 4, 6]
    assert len(expert_cache.arena) == 12 and expert_cache.take_counts().demand_bytes == 0
    assert sum(expert_cache.is_resident(6 + e) for e in range(EXPERTS)) == 4  # none of layer 1 was evicted
    expert_cache.reshape(slots=10)
    assert [expert_cache.pool(layer).capacity for layer in range(LAYERS)] == [2, 4, 4]
    expert_cache.check_integrity()
