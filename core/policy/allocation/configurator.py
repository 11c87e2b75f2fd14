"""MoEpic's cache configurator (section 3.4.2, Algorithm 1): a budget divided among layers by what it saves, and the
least budget for a given speed. Beside it, by the same latency model, the divisions that it is compared with.

The paper leaves open, and this fixes: a layer gives only while it keeps something, and takes only up to all of its
experts; ties go to the lower layer; the number of moves is bounded."""

import math
from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np

from core.errors import SettingError
from core.policy.allocation.cache_plan import CachePlan
from core.policy.allocation.curves import Curves, Floats
from core.policy.allocation.expert_split import ROUNDING, LayerTimes, Parts, split_experts
from core.policy.allocation.slots import proportional, shares
from core.policy.allocation.weights import Allocation, adapmoe_loads

ZETA = 0.01  # part of the budget that one move takes from a layer and gives to another
ROUNDS = 400  # moves at most: four times as many as there are parts of that size
WHOLE = 1.0  # theta of a cache without splitting


def plans(
    curves: Curves,
    times: LayerTimes,
    budget: float,
    *,
    zeta: float = ZETA,
    theta: float | None = None,
    least: float = 0.0,
) -> Iterator[CachePlan]:
    """Divide `budget`, in whole experts, among the layers: even shares, then a plan for each move of zeta of it from
    the layer that loses least to the one that gains most. Each has less exposed time than the one before.

    `theta`: one split for all layers instead of each layer's best. 1 plans a cache of whole experts, whose layers have
    whole slots. `least`: slots that every layer keeps. Raises SettingError when the budget is too small for that."""
    layers, experts = curves.layers, curves.experts
    budget = min(budget, float(layers * experts))
    if budget < layers * least or budget < 0:
        raise SettingError(
            f"The budget of {budget:g} experts is too small: {layers} layers keep at least {least:g} each, "
            f"{layers * least:g} in all."
        )
    slots, part = _even(curves, budget, theta), zeta * budget
    if theta == WHOLE:
        part = float(max(1, round(part)))
    now = split_experts(curves, times, slots, theta)
    for rounds in range(1, ROUNDS + 1):
        yield CachePlan.of(slots, now, times, rounds - 1)
        takes, gives = slots[0] + part <= experts + ROUNDING, slots[0] - part >= least - ROUNDING
        gives &= slots[0] > part
        shifted = np.concatenate([np.minimum(slots + part, experts), np.maximum(slots - part, 0.0)])
        more_ms, less_ms = split_experts(curves, times, shifted, theta).exposed_ms
        taker = int(np.where(takes, now.exposed_ms[0] - more_ms, -np.inf).argmax())
        gives[taker] = False
        if not takes[taker] or not gives.any():
            return
        giver = int(np.where(gives, less_ms - now.exposed_ms[0], np.inf).argmin())
        moved = slots.copy()
        moved[0, taker], moved[0, giver] = min(moved[0, taker] + part, experts), moved[0, giver] - part
        then = split_experts(curves, times, moved, theta)
        if (then.exposed_ms - now.exposed_ms).sum() >= 0:
            return
        slots, now = moved, then
    yield CachePlan.of(slots, now, times, ROUNDS)


def plan_cache(
    curves: Curves,
    times: LayerTimes,
    budget: float,
    *,
    zeta: float = ZETA,
    theta: float | None = None,
    least: float = 0.0,
) -> CachePlan:
    """The last of these `plans`."""
    (last,) = deque(plans(curves, times, budget, zeta=zeta, theta=theta, least=least), maxlen=1)
    return last


def plan_even(curves: Curves, times: LayerTimes, budget: float, theta: float | None = None) -> CachePlan:
    """Every layer has the same share; each its best split, or all of them `theta`."""
    slots = _even(curves, min(budget, float(curves.layers * curves.experts)), theta)
    return CachePlan.of(slots, split_experts(curves, times, slots, theta), times)


def plan_given(
    curves: Curves, times: LayerTimes, slots: Sequence[float], theta: Sequence[Parts], rounds: int = 0
) -> CachePlan:
    """What the latency model expects of these slots of each layer, in whole experts, and these parts of an expert; of
    several parts for a layer, with its best. Raises ValueError unless there is one of each a layer."""
    if not len(slots) == len(theta) == curves.layers:
        raise ValueError(f"{len(slots)} slots and {len(theta)} parts for {curves.layers} layers")
    given = np.minimum(np.array([slots], np.float64), curves.experts)
    return CachePlan.of(given, split_experts(curves, times, given, tuple(theta)), times, rounds)


def in_whole_blocks(curves: Curves, times: LayerTimes, plan: CachePlan, budget: float, blocks: int) -> CachePlan:
    """The plan as a cache of `budget` experts in so many equal blocks can hold it: the layers have whole blocks in its
    proportions, and each the best part for them."""
    sizes = proportional(plan.slots, int(budget * blocks + ROUNDING), [0] * curves.layers, curves.experts * blocks)
    parts = [top / blocks for top in range(blocks, 0, -1)]
    return plan_given(curves, times, [size / blocks for size in sizes], [parts] * curves.layers, plan.rounds)


def plan_adapmoe(curves: Curves, times: LayerTimes, budget: float) -> CachePlan:
    """Whole experts, divided with the fewest loads to expect (core.policy.allocation.weights)."""
    layers, k = curves.layers, curves.top_k
    total = min(int(budget + ROUNDING), layers * curves.experts)
    divide = Allocation(-adapmoe_loads(curves.hit, curves.recall, k), (min(k, curves.experts),) * layers)
    slots = np.array([divide(total)], np.float64)
    return CachePlan.of(slots, split_experts(curves, times, slots, WHOLE), times)


def least_budget(
    curves: Curves,
    times: LayerTimes,
    tpot_ms: float,
    *,
    zeta: float = ZETA,
    theta: float | None = None,
    least: float = 0.0,
) -> CachePlan:
    """The plan of the least budget, in whole experts, that a token of `tpot_ms` is predicted for: with one expert less,
    its own plan misses the target. Found by bisection, in at most log2(L E) + 1 plans.

    Raises SettingError when even all experts resident do not suffice."""

    def planned(budget: int) -> CachePlan:
        return plan_cache(curves, times, budget, zeta=zeta, theta=theta, least=least)

    low, high = math.ceil(curves.layers * least - ROUNDING) - 1, curves.layers * curves.experts
    best = planned(high)
    if best.tpot_ms > tpot_ms:
        raise SettingError(
            f"No budget reaches {tpot_ms:g} ms a token: with every expert resident one takes {best.tpot_ms:.4g} ms, "
            f"of which {best.compute_ms:.4g} ms are computing. Ask for more than that."
        )
    while high - low > 1:
        middle = (low + high) // 2
        found = planned(middle)
        if found.tpot_ms <= tpot_ms:
            best, high = found, middle
        else:
            low = middle
    return best


def _even(curves: Curves, budget: float, theta: float | None) -> Floats:
    """[1, L] even shares, of whole experts where no expert is split."""
    if theta == WHOLE:
        return np.array([shares(int(budget + ROUNDING), curves.layers)], np.float64)
    return np.full((1, curves.layers), budget / curves.layers)
