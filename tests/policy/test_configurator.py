"""MoEpic's latency model and allocation: by hand, and against every cache size and every division on small cases."""

import json
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.errors import SettingError
from core.policy.allocation.cache_plan import CachePlan, LayerBlocks
from core.policy.allocation.configurator import (
    in_whole_blocks,
    least_budget,
    plan_adapmoe,
    plan_cache,
    plan_even,
    plan_given,
    plans,
)
from core.policy.allocation.curves import Curves, curves_of
from core.policy.allocation.expert_split import LayerTimes, split_experts, split_layer
from tests.selection import examples

TIMES = LayerTimes(att_ms=1.0, moe_ms=4.0, head_ms=2.0, load_ms=3.0)
LAYERS, EXPERTS, K = 3, 4, 2


def by_hand(layers: int) -> Curves:
    """The same numbers in every layer: two of four experts a token, a ranking of two."""
    hit = [0.0, 0.3, 0.5, 0.85, 1.0]
    cached = [[0.0, 0.0], [0.4, 0.3], [0.6, 0.5], [0.9, 0.8], [1.0, 1.0]]
    return Curves(2, 100, *(np.array([one] * layers) for one in (hit, [0.8, 0.5], cached)))


def some(seed: int, layers: int = LAYERS, experts: int = EXPERTS, ranks: int = EXPERTS) -> Curves:
    """Hit rates that rise with the size, and a ranking whose first places are right most often."""
    rng = np.random.default_rng(seed)
    uses = rng.dirichlet(np.full(experts, rng.uniform(0.2, 2.0)), layers)
    hit = curves_of(uses, K).hit
    chosen = -np.sort(-rng.beta(1.0, 1.5, (layers, ranks)), 1)
    cached = np.clip(hit[:, :, None] * rng.uniform(0.7, 1.2, (layers, 1, ranks)), 0.0, 1.0)
    return Curves(K, 1000, hit, chosen, cached)


def some_times(seed: int) -> LayerTimes:
    return LayerTimes(*np.random.default_rng(seed + 1).uniform(0.1, 3.0, 4).tolist())


def ready(curves: Curves, layer: int, cached: int, theta: float, window_ms: float, load_ms: float) -> float:
    found, copied = curves.top_k * float(curves.hit[layer, cached]) * theta, 0.0
    for rank in range(curves.chosen.shape[1]):
        fetched = 1.0 - float(curves.cached[layer, cached, rank]) * theta
        copied += fetched
        if copied * load_ms > window_ms:
            break
        found += fetched * float(curves.chosen[layer, rank])
    return min(max(found, 0.0), float(curves.top_k))


def exposed(curves: Curves, times: LayerTimes, slots: Any, theta: float | None = None) -> list[float]:
    """Equations 5 to 7, layer after layer, with the best of all cache sizes."""
    k, waits, window_ms = curves.top_k, [], times.head_ms + times.att_ms
    for layer, each in enumerate(slots):
        sizes = range(1, curves.experts + 1)
        if theta is None:
            options = [(c, min(1.0, each / c)) for c in sizes]
        else:
            options = [(min(curves.experts, int(each / theta + 1e-9)) if theta else 0, theta)]
        m = max(ready(curves, layer, *option, window_ms, times.load_ms) for option in options)
        hide_ms, miss_ms = m * times.moe_ms / k, (k - m) * times.load_ms
        waits.append(max(0.0, miss_ms - hide_ms))
        window_ms = times.moe_ms - min(hide_ms, miss_ms) + times.att_ms
    return waits


def test_equal_sizes_give_the_smallest() -> None:
    """Everything is predicted and there is time for it: every size is as good."""
    curves = by_hand(1)
    sure = Curves(2, 1, curves.hit, np.ones((1, 4)), np.zeros((1, 5, 4)))
    found = split_layer(sure, 0, np.array([0.0, 2.0]), np.array([100.0, 100.0]), 1.0)
    assert found.cached.tolist() == [1, 1] and found.ready.tolist() == [2.0, 2.0]


@given(
    seed=st.integers(0, 2**32),
    ranks=st.integers(0, EXPERTS),
    slots=st.lists(st.floats(0, EXPERTS), min_size=LAYERS, max_size=LAYERS),
    theta=st.sampled_from([None, None, 0.0, 0.25, 0.5, 1.0]),
)
def test_the_split_is_the_best_of_all_sizes(seed: int, ranks: int, slots: list[float], theta: float | None) -> None:
    curves, times = some(seed, ranks=ranks), some_times(seed)
    split = split_experts(curves, times, np.array([slots, slots[::-1]]), theta)
    for row, each in enumerate((slots, slots[::-1])):
        assert split.exposed_ms[row] == pytest.approx(exposed(curves, times, each, theta), abs=1e-9)
        for layer in range(LAYERS):
            c, share = int(split.cached[row, layer]), float(split.theta[row, layer])
            assert c * share <= each[layer] + 1e-8 and 0 <= c <= EXPERTS and 0 <= share <= 1
            window_ms = float(split.window_ms[row, layer])
            best = ready(curves, layer, c, share, window_ms, times.load_ms)
            assert split.ready[row, layer] == pytest.approx(best, abs=1e-9)


def divisions(budget: float, part: float) -> list[list[float]]:
    """Every division that moves of `part` lead to from even shares."""
    even = budget / LAYERS
    reach = range(-int(even / part) - 1, int(EXPERTS / part) + 2)
    found = []
    for moves in product(reach, repeat=LAYERS - 1):
        slots = [even + n * part for n in (*moves, -sum(moves))]
        if all(0 < each <= EXPERTS + 1e-9 for each in slots):
            found.append(slots)
    return found


@given(seed=st.integers(0, 2**32), budget=st.sampled_from([1.5, 3.0, 6.0, 9.0]), zeta=st.sampled_from([0.05, 0.1]))
@examples(30)
def test_exposed_time_falls_with_every_move_and_the_parts_add_up(seed: int, budget: float, zeta: float) -> None:
    curves, times = some(seed), some_times(seed)
    made = list(plans(curves, times, budget, zeta=zeta))
    assert made[0] == plan_even(curves, times, budget) and made[-1] == plan_cache(curves, times, budget, zeta=zeta)
    for at, plan in enumerate(made):
        assert plan.rounds == at and plan.budget == pytest.approx(budget)
        assert all(0 < each <= EXPERTS + 1e-9 for each in plan.slots)
        assert plan.exposed_ms == pytest.approx(exposed(curves, times, plan.slots), abs=1e-9)
        changed = sum(a != b for a, b in zip(plan.slots, made[max(0, at - 1)].slots, strict=True))
        assert changed == (2 if at else 0)
    waits = [sum(plan.exposed_ms) for plan in made]
    assert all(after < before for before, after in pairwise(waits))


def test_the_allocation_against_every_division() -> None:
    """It climbs, so that it need not find the best of all divisions: it never claims less waiting than that one has,
    and on average it leaves little of what the best one saves."""
    saved, possible = 0.0, 0.0
    for seed in range(40):
        curves, times = some(seed), some_times(seed)
        budget, zeta = 4.0, 0.1
        least = min(sum(exposed(curves, times, slots)) for slots in divisions(budget, zeta * budget))
        even, plan = plan_even(curves, times, budget), plan_cache(curves, times, budget, zeta=zeta)
        assert sum(plan.exposed_ms) >= least - 1e-9
        saved += sum(even.exposed_ms) - sum(plan.exposed_ms)
        possible += sum(even.exposed_ms) - least
    assert 0 < saved <= possible + 1e-9 and saved >= 0.8 * possible


@given(seed=st.integers(0, 2**32), budget=st.integers(LAYERS * K, LAYERS * EXPERTS))
@examples(30)
def test_whole_experts_have_whole_slots(seed: int, budget: int) -> None:
    curves, times = some(seed), some_times(seed)
    for plan in (
        plan_cache(curves, times, budget, theta=1.0, least=K),
        plan_adapmoe(curves, times, budget),
        plan_even(curves, times, budget, theta=1.0),
    ):
        assert sum(plan.slots) == budget and all(each == int(each) and K <= each <= EXPERTS for each in plan.slots)
        assert plan.cached == tuple(map(int, plan.slots)) and set(plan.theta) == {1.0}
        assert plan.exposed_ms == pytest.approx(exposed(curves, times, plan.slots, 1.0), abs=1e-9)


def test_ties_go_to_the_lower_layer_and_full_layers_take_nothing() -> None:
    alike = by_hand(3)
    slow = LayerTimes(1.0, 1.0, 0.0, 50.0)
    plan = plan_cache(alike, slow, 3.0, zeta=0.1)
    assert plan == plan_cache(alike, slow, 3.0, zeta=0.1)
    full = plan_cache(alike, slow, 100.0)
    assert full.slots == (4.0, 4.0, 4.0) and full.rounds == 0 and sum(full.exposed_ms) == 0.0
    nothing = plan_cache(alike, slow, 0.0)
    assert nothing.slots == (0.0,) * 3 and sum(nothing.exposed_ms) > 0
    with pytest.raises(SettingError, match="The budget of 5 experts is too small: 3 layers keep at least 2 each, 6"):
        plan_cache(alike, slow, 5, least=2)


@given(seed=st.integers(0, 2**32), wish=st.floats(0, 1), theta=st.sampled_from([None, 1.0]))
@examples(30)
def test_the_least_budget_meets_the_target_and_one_less_does_not(seed: int, wish: float, theta: float | None) -> None:
    curves, times = some(seed), some_times(seed)
    least = K if theta else 0
    low, high = LAYERS * least, LAYERS * EXPERTS
    first, last = (plan_cache(curves, times, n, theta=theta, least=least).tpot_ms for n in (low, high))
    target_ms = last + wish * (first - last)
    plan = least_budget(curves, times, target_ms, theta=theta, least=least)
    budget = round(plan.budget)
    assert plan.tpot_ms <= target_ms and plan == plan_cache(curves, times, budget, theta=theta, least=least)
    if budget > low:
        assert plan_cache(curves, times, budget - 1, theta=theta, least=least).tpot_ms > target_ms


def test_what_no_budget_reaches_is_refused() -> None:
    with pytest.raises(SettingError, match=r"No budget reaches 11 ms a token: with every expert resident .* 12 ms"):
        least_budget(by_hand(2), TIMES, 11.0)
    assert least_budget(by_hand(2), TIMES, 1e9).budget == 0.0


def test_curves_of_uses_and_of_a_recall() -> None:
    curves = curves_of(np.array([[1, 6, 3, 0], [5, 5, 0, 0]]), 2)
    assert curves.hit[0].tolist() == pytest.approx([0, 0.6, 0.9, 1, 1]) and curves.tokens == 5
    assert curves.chosen.shape == (2, 0) and curves.recall.tolist() == [0.0, 0.0]
    with_gate = curves.with_recall(np.array([np.nan, 0.8]))
    assert with_gate.recall.tolist() == pytest.approx([0.0, 0.8])
    assert with_gate.cached[1, :, 0].tolist() == curves.hit[1].tolist() and not with_gate.cached[0].any()
    with pytest.raises(ValueError, match="do not fit"):
        Curves(2, 1, np.zeros((2, 5)), np.zeros((2, 3)), np.zeros((2, 5, 2)))


def test_a_plan_survives_json_and_a_damaged_one_is_refused() -> None:
    plan = plan_cache(by_hand(2), TIMES, 2.0)
    text = json.loads(json.dumps(plan.as_json()))
    assert CachePlan.from_json(text, 2, 4) == plan
    for name, value, why in (
        ("slots", [1.0], "slots for each layer"),
        ("slots", [1.0, 5.0], "slots that no layer can have"),
        ("theta", [0.5, 1.5], "theta that no"),
        ("theta", [0.5, True], "theta that no"),
        ("cached", [1, 2.5], "cached that no"),
        ("exposed_ms", [1.0, float("nan")], "exposed_ms that no"),
        ("compute_ms", -1.0, "a time or a number"),
        ("rounds", "3", "a time or a number"),
    ):
        with pytest.raises(ValueError, match=why):
            CachePlan.from_json({**text, name: value}, 2, 4)
    for damaged in ({}, None, {**text, "more": 1}):
        with pytest.raises(ValueError, match="does not say what a plan says"):
            CachePlan.from_json(damaged, 2, 4)


def test_a_plan_in_blocks_stays_within_its_slots() -> None:
    plan = CachePlan((1.5, 0.5, 4.0, 0.1), (3, 3, 4, 0), (0.5, 1 / 6, 1.0, 0.0), (0.0,) * 4, 1.0)
    assert plan.in_blocks(8) == (LayerBlocks(12, 4), LayerBlocks(4, 1), LayerBlocks(32, 8), LayerBlocks(0, 0))
    assert plan.in_blocks(2) == (LayerBlocks(3, 1), LayerBlocks(1, 1), LayerBlocks(8, 2), LayerBlocks(0, 0))


@examples(30)
@given(seed=st.integers(0, 10_000), budget=st.floats(0.0, 12.0), blocks=st.integers(2, 5))
def test_whole_blocks_use_the_budget_with_the_best_part_of_each_layer(seed: int, budget: float, blocks: int) -> None:
    curves, times = some(seed), some_times(seed)
    plan = in_whole_blocks(curves, times, plan_cache(curves, times, budget), budget, blocks)
    assert sum(plan.slots) * blocks == pytest.approx(int(min(budget, LAYERS * EXPERTS) * blocks + 1e-9))
    window_ms = times.head_ms + times.att_ms
    for layer, (slots, theta) in enumerate(zip(plan.slots, plan.theta, strict=True)):
        assert slots * blocks == pytest.approx(round(slots * blocks))
        tops = [(min(EXPERTS, int(slots * blocks / top + 1e-9)), top / blocks) for top in range(1, blocks + 1)]
        options = {part: ready(curves, layer, c, part, window_ms, times.load_ms) for c, part in tops}
        m = options[theta]
        assert m == pytest.approx(max(options.values()))
        hide_ms, miss_ms = m * times.moe_ms / K, (K - m) * times.load_ms
        assert plan.exposed_ms[layer] == pytest.approx(max(0.0, miss_ms - hide_ms))
        window_ms = times.moe_ms - min(hide_ms, miss_ms) + times.att_ms
    again = in_whole_blocks(curves, times, plan, budget, blocks)
    assert again == plan, "what the engine makes of it is the plan"


def test_a_layer_may_choose_among_parts_and_a_given_one_stays() -> None:
    curves, times = some(3), some_times(3)
    given = plan_given(curves, times, [3.0] * LAYERS, [0.5] * LAYERS)
    assert given.theta == (0.5,) * LAYERS
    assert given.exposed_ms == pytest.approx(exposed(curves, times, given.slots, 0.5))
    free = plan_given(curves, times, [3.0] * LAYERS, [[0.5, 1.0]] * LAYERS)
    assert set(free.theta) <= {0.5, 1.0}
    assert plan_given(curves, times, [99.0] * LAYERS, [1.0] * LAYERS).slots == (EXPERTS,) * LAYERS
    with pytest.raises(ValueError, match="2 parts for"):
        plan_given(curves, times, [3.0] * LAYERS, [0.5] * 2)
