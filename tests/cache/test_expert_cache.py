"""Leases, hints, pins and changes of policy and size, case by case, over real copies."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.cache.expert_cache import ExpertCache
from core.cache.lease import leases
from core.policy.allocation.slot_allocation import Placement
from core.policy.allocation.slots import WAVES, waves
from core.policy.predict import LayerMap, Prediction
from core.settings.registry import create, variants
from core.types import Outcome
from tests.cache.machine import EXPERTS, LAYERS, build, hold
from tests.selection import layered

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
    assert expert_cache.take_counts().demand_bytes == expert_cache.store.blob_bytes  # filling is not counted as demand


@given(st.sets(st.integers(0, 30), min_size=1), st.sets(st.integers(0, 30)), st.integers(1, 40))
def test_as_many_are_leased_ahead_as_fit_none_fetched_twice(wanted: set[int], resident: set[int], room: int) -> None:
    resident = set(sorted(resident)[:room])
    here, leased = set(resident), list[int]()
    fetched, computed, looked = list[int](), list[int](), list[int]()

    def acquire(group: list[int]) -> list[int]:
        leased.extend(group)
        assert len(leased) <= room
        for expert in group:
            if expert not in here:
                fetched.append(expert)
                if len(here) == room:
                    here.remove(min(here - set(leased)))  # there is one
                here.add(expert)
        return group

    def release(group: list[int]) -> None:
        del leased[: len(group)]

    groups = waves(sorted(wanted), room, lambda expert: expert not in here)
    for group in leases(groups, room, acquire, release, lambda: looked.append(len(fetched))):
        assert leased[: len(group)] == group and set(group) <= here
        computed += group
        unused = [one for one in wanted - set(computed) - set(leased) if one not in here]
        following = next((each for each in groups if set(each) <= set(unused)), None)
        assert following is None or len(leased) + len(following) > room, "more could be fetched during that"
    assert sorted(computed) == sorted(wanted)
    assert sorted(fetched) == sorted(wanted - resident)
    assert looked == [len(fetched)] and not leased


@pytest.mark.parametrize(
    ("room", "size", "residents"),
    [(32, 4, [4, 4, 8, 16]), (9, 1, [1, 1, 2, 4, 8, 9, 7]), (3, 1, [1, 1, 2, *[3] * 9, 1])],
)
def test_groups_of_residents_grow_and_those_to_fetch_are_small(room: int, size: int, residents: list[int]) -> None:
    """No group is larger than the room; more residents than that are pinned."""
    assert room // WAVES in (size, 0)
    groups = waves(range(64), room, lambda expert: expert % 2 == 0)
    assert [len(group) for group in groups if group[0] % 2] == residents
    assert {len(group) for group in groups if group[0] % 2 == 0} == {size}
    order = [expert for group in groups for expert in group]
    assert order == [*range(1, 64, 2), *range(0, 64, 2)]


TOP_K = 2
POLICIES = [v.name for v in variants("eviction")]
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


@pytest.mark.parametrize("name", layered(POLICIES, quick=lambda name: name in OFTEN))
@given(
    steps=st.lists(st.tuples(st.integers(0, LAYERS - 1), st.permutations(range(EXPERTS)), st.booleans()), max_size=40)
)
@settings(max_examples=10)
def test_pinned_experts_stay_whatever_happens(name: str, steps: list[tuple[int, list[int], bool]]) -> None:
    expert_cache = unlike(name)
    for now, (layer, experts, ahead) in enumerate(steps):
        expert_cache.core.now = now
        lease = hold(expert_cache, layer, experts[:TOP_K])
        if ahead:
            expert_cache.prefetch([Prediction((layer + 1) % LAYERS, e, 0.9) for e in experts], layer)
        expert_cache.release(lease)
        assert all(expert_cache.is_resident(eid) for eid in PINS)
        expert_cache.check_integrity()


def test_pins_are_loaded_at_once_and_counted() -> None:
    expert_cache = build(LAYERS * 3)
    expert_cache.fill()
    expert_cache.take_counts()
    expert_cache.pin([5, 0])  # 0 is there already
    size = expert_cache.store.blob_bytes
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
    expert_cache = build(LAYERS * TOP_K)
    expert_cache.pin([0, 1])
    expert_cache.release(hold(expert_cache, 0, [2, 3]))  # both slots of the layer are needed
    assert not expert_cache.is_resident(0) and not expert_cache.is_resident(1)
    expert_cache.prefetch([Prediction(1, 3, 0.9)], 0)
    expert_cache.check_integrity()


@pytest.mark.parametrize("change", [dict(slots=9), dict(scope="global"), dict(slots=LAYERS * EXPERTS)])
def test_pinned_experts_move_with_every_change_of_the_cache(change: dict[str, Any]) -> None:
    expert_cache = unlike("lru")
    expert_cache.place(replace(Placement.even(LAYERS, EXPERTS, TOP_K, "layer"), pinned=frozenset(PINS)))
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
