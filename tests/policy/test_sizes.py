"""Sizes of a cache per layer, the entropy of gate weights, and experts that stand out."""

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from core.policy.allocation.slots import proportional
from core.policy.allocation.weights import Allocation, AllocationInputs, adapmoe_loads, gains, greedy, hit_curves
from core.policy.substitute.entropy import entropy, entropy_of_token
from core.policy.substitute.super_experts import mask, outstanding, super_experts
from core.settings.registry import create, variants
from tests.selection import examples

NAMES = [v.name for v in variants("layer_slots")]
LAYERS, EXPERTS = 3, 4
counted = arrays(np.int64, (LAYERS, EXPERTS), elements=st.integers(0, 50))


def divisions(slots: int, least: Sequence[int], experts: int = EXPERTS) -> list[tuple[int, ...]]:
    return [sizes for sizes in product(*(range(low, experts + 1) for low in least)) if sum(sizes) == slots]


def worth(value: Any, sizes: Sequence[int]) -> float:
    return float(sum(value[layer, c] for layer, c in enumerate(sizes)))


@st.composite
def asked(draw: st.DrawFn) -> tuple[list[int], int]:
    """(least of each layer, a total that suffices)."""
    least = draw(st.lists(st.integers(0, 2), min_size=LAYERS, max_size=LAYERS))
    return least, draw(st.integers(sum(least), LAYERS * EXPERTS))


def test_hit_curves_by_hand() -> None:
    counts = np.array([[1, 6, 3, 0], [0, 0, 0, 0]])
    assert gains(counts).tolist() == [[0.6, 0.3, 0.1, 0.0], [0.25] * 4]  # never seen: all alike
    assert np.allclose(hit_curves(counts), [[0, 0.6, 0.9, 1, 1], [0, 0.25, 0.5, 0.75, 1]])


def test_greedy_divides_evenly_where_there_is_too_little_for_all_or_nothing_is_known() -> None:
    assert greedy(gains(np.array([[97, 1, 1, 1], [25, 25, 25, 25]])), 3, [2, 2]) == [2, 1]
    assert greedy(gains(np.zeros((3, 4))), 7, [1, 1, 1]) == [3, 2, 2]  # earlier first


@given(counts=counted, wanted=asked())
def test_greedy_is_the_best_of_all_divisions(counts: Any, wanted: tuple[list[int], int]) -> None:
    least, slots = wanted
    sizes = greedy(gains(counts), slots, least)
    assert tuple(sizes) in divisions(slots, least)
    curves = hit_curves(counts)
    assert worth(curves, sizes) == pytest.approx(max(worth(curves, other) for other in divisions(slots, least)))


@given(value=arrays(np.float64, (LAYERS, EXPERTS + 1), elements=st.floats(-5, 5, width=32)), wanted=asked())
def test_dynamic_programming_is_the_best_of_all_divisions(value: Any, wanted: tuple[list[int], int]) -> None:
    least, slots = wanted
    sizes, largest = Allocation(value, least)(slots), max(worth(value, other) for other in divisions(slots, least))
    assert tuple(sizes) in divisions(slots, least)
    assert worth(value, sizes) == pytest.approx(largest, abs=1e-7)


def test_what_gains_nothing_is_divided_evenly() -> None:
    flat = np.zeros((3, 7))
    flat[1, 2:] = 1.0
    assert Allocation(flat, [0, 0, 0])(9) == [3, 3, 3]
    assert Allocation(flat, [0, 0, 5])(9) == [2, 2, 5]
    assert Allocation(flat, [2, 0, 5])(8) == [2, 1, 5]  # two for layer 1 there are not


def test_adapmoe_loads_by_hand() -> None:
    """Two of eight experts, all equally likely: what AdapMoE writes for Mixtral, from its three cases.

    3 slots, beta 0.5: both missing 5 x 4 / 56, one missing 2 x 5 x 3 / 56. With both missing one is fetched with
    probability 0.5, so 1.5 are left; of one, 0.5: 20 / 56 x 1.5 + 30 / 56 x 0.5 = 45 / 56."""
    alike = hit_curves(np.ones((1, 8)))
    loads = adapmoe_loads(alike, np.array([0.5]), 2)[0]
    assert loads[3] == pytest.approx(45 / 56)
    for slots in range(9):
        both, one = (8 - slots) * (7 - slots) / 56, 2 * (8 - slots) * slots / 56
        assert loads[slots] == pytest.approx(both * (2 - 0.5) + one * (1 - 0.5))
    # A layer nobody can predict: just the misses. One that is always predicted right needs a slot less.
    assert np.allclose(adapmoe_loads(alike, np.array([np.nan]), 2)[0], 2 * (1 - np.arange(9) / 8))
    assert adapmoe_loads(alike, np.array([1.0]), 2)[0, 7] == pytest.approx(0.0)
    # Favourites: two experts do 6/8 of the work, so that two slots hit as six of eight equally likely ones would: half
    # an expert is missing, and at least one in 1 - 6 x 5 / 56 of the cases.
    some = hit_curves(np.array([[3, 3, 1, 1, 0, 0, 0, 0]]))
    assert adapmoe_loads(some, np.array([0.5]), 2)[0, 2] == pytest.approx(0.5 - 0.5 * 26 / 56)


@given(counts=counted, recall=arrays(np.float32, LAYERS, elements=st.floats(0, 1, width=32)), wanted=asked())
def test_adapmoe_has_the_fewest_expected_loads(counts: Any, recall: Any, wanted: tuple[list[int], int]) -> None:
    least, slots = wanted
    made = create("layer_slots", "adapmoe", {}, facts=AllocationInputs(EXPERTS, 2, tuple(least), counts, recall))
    loads = adapmoe_loads(hit_curves(counts), recall, 2)
    assert (loads >= -1e-9).all()
    fewest = min(worth(loads, other) for other in divisions(slots, least))
    assert worth(loads, made(slots)) == pytest.approx(fewest, abs=1e-7)


@pytest.mark.parametrize("name", NAMES)
@given(counts=counted, slots=st.integers(0, LAYERS * EXPERTS))
@examples(50)
def test_every_way_adds_up_and_repeats(name: str, counts: Any, slots: int) -> None:
    plan = tuple(map(float, counts.sum(1)))
    facts = AllocationInputs(EXPERTS, 1, (1,) * LAYERS, counts, np.array([np.nan, 0.2, 0.9]), plan)
    sizes = create("layer_slots", name, {}, facts=facts)(slots)
    assert sum(sizes) == slots and len(sizes) == LAYERS and max(sizes) <= EXPERTS
    assert slots < LAYERS or min(sizes) >= 1
    assert create("layer_slots", name, {}, facts=facts)(slots) == sizes


def test_a_plans_proportions_in_whole_slots() -> None:
    assert proportional([6.0, 3.0, 1.0], 10, [1, 1, 1], 9) == [6, 3, 1]
    assert proportional([6.0, 3.0, 1.0], 20, [1, 1, 1], 9) == [9, 8, 3]  # 12 there is no room for
    assert proportional([6.0, 3.0, 1.0], 5, [2, 2, 1], 9) == [2, 2, 1]
    assert proportional([1.0, 1.0, 1.0], 8, [0, 0, 0], 9) == [3, 3, 2]  # what is left over: earlier ones first
    assert proportional([0.0, 0.0, 0.0], 7, [1, 1, 1], 9) == [3, 2, 2]
    assert proportional([5.0, 1.0, 1.0], 4, [2, 2, 2], 9) == [2, 1, 1]  # too few for all: evenly
    with_plan = AllocationInputs(8, 2, (2, 2), plan=(14.0, 6.0))
    assert create("layer_slots", "moepic", {}, facts=with_plan)(10) == [7, 3]


def gates(experts: int) -> np.ndarray:
    """fp64 [500, k] as routers give them, in fp32: peaked and flat, with zeros, not all renormalised."""
    rng = np.random.default_rng(experts)
    weights = rng.dirichlet([0.4] * experts, 500) * rng.choice([1.0, 0.3, 2.5], (500, 1))
    weights[:100][rng.random((100, experts)) < 0.5] = 0.0
    weights[100:110], weights[110:120] = 1.0 / experts, np.eye(experts)[0]
    return weights.astype(np.float32).astype(np.float64)


@pytest.mark.parametrize("experts", [1, 2, 3, 4, 6, 8, 10, 64])
@pytest.mark.parametrize("temperature", [1.0, 0.5, 1.7])
def test_arrays_tensors_and_numbers_agree(experts: int, temperature: float) -> None:
    weights = gates(experts)
    found = entropy(weights, temperature)
    assert found.dtype == np.float64 and found.shape == (500,) and ((found >= 0) & (found <= 1)).all()
    tensor = entropy(torch.from_numpy(weights), temperature, torch)
    assert tensor.dtype == torch.float64
    np.testing.assert_allclose(tensor.numpy(), found, rtol=0, atol=1e-14)
    np.testing.assert_allclose([entropy_of_token(row, temperature) for row in weights.tolist()], found, atol=1e-14)


@pytest.mark.parametrize("experts", [2, 4, 8])
def test_the_figures_of_profiles_and_recordings_keep_their_bits(experts: int) -> None:
    """In these very steps profiles and recordings have always been computed; leading dimensions change nothing."""
    weights = gates(experts)
    shares = weights / np.maximum(weights.sum(-1, keepdims=True), 1e-30)
    logs = np.log(np.where(shares > 0, shares, 1.0))
    expected = np.clip(-(shares * logs).sum(-1) / max(np.log(experts), 1e-30), 0.0, 1.0)
    assert entropy(weights).tobytes() == expected.tobytes()
    assert entropy(weights.reshape(5, 100, experts)).tobytes() == expected.tobytes()


L, E = 8, 64  # of which the first six layers are looked at


def ordinary(seed: int = 0) -> npt.NDArray[np.float32]:
    return np.random.default_rng(seed).uniform(1, 2, (L, E)).astype(np.float32)


def test_outliers_are_found_the_largest_first() -> None:
    peaks = ordinary()
    peaks[1, 60], peaks[2, 5] = 300, 900
    found = super_experts(peaks)
    assert [(one.layer, one.expert) for one in found] == [(2, 5), (1, 60)]
    assert found[0].peak == 900 and found[0].ratio == pytest.approx(900 / np.median(peaks[2]))
    assert np.argwhere(mask(peaks)).tolist() == [[1, 60], [2, 5]]


def test_where_nothing_stands_out_none_is_super() -> None:
    """Although something is above every percentile, and above a tenth of the largest."""
    peaks = ordinary()
    assert super_experts(peaks) == [] and not mask(peaks).any()
    assert len(super_experts(peaks, outlying=0.0)) == 2
    most = outstanding(peaks)
    ratios = peaks[:6] / np.median(peaks[:6], 1, keepdims=True)
    assert most is not None and most.ratio == pytest.approx(ratios.max())
    assert ratios[most.layer, most.expert] == ratios.max()


@pytest.mark.parametrize(
    ("peaks", "found"),
    [
        ({(0, 0): 1000, (1, 1): 99}, [(0, 0)]),  # a tenth of the largest is asked of it
        ({(0, 0): 1000, (1, 1): 101}, [(0, 0), (1, 1)]),
        ({(3, at): 100 + at for at in range(20)}, [(3, 19), (3, 18)]),  # two of 384 are above the 99.5th percentile
        ({6: 1500, 7: 1e6}, []),  # the last quarter is left out: it takes massive activations away again
        ({6: 1500, 7: 1e6, (5, 1): 50}, [(5, 1)]),
        ({4: 150}, []),  # a layer with larger outputs
    ],
)
def test_which_experts_stand_out(peaks: dict[Any, Any], found: list[tuple[int, int]]) -> None:
    drawn = ordinary()
    for at, value in peaks.items():
        drawn[at] = value
    assert [(one.layer, one.expert) for one in super_experts(drawn)] == found
    assert super_experts(ordinary()[:1] * np.where(np.arange(E) == 9, 70, 1))[0][:2] == (0, 9), "a single layer"


def test_experts_that_were_never_chosen_count_nothing() -> None:
    peaks = np.zeros((L, E), np.float32)
    assert super_experts(peaks) == [] and outstanding(peaks) is None and not mask(peaks).any()
    peaks[2, :8] = 1
    peaks[2, 3] = 40
    assert [(one.layer, one.expert, one.ratio) for one in super_experts(peaks)] == [(2, 3, 40.0)]
    peaks[:] = 0
    peaks[2, 3] = 40  # with nobody beside it
    assert super_experts(peaks) == []
