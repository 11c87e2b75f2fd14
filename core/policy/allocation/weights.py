"""Divides slots among layers when each layer has its own pool: evenly, or by the gain that a profile shows.

Pure functions over arrays [layers, ...], and the registered ways to divide. A way is built once from `AllocationInputs`
and called for any total: a budget change calls it again. Every division adds up to the given total, gives no layer more
slots than experts, and none fewer than its `least` as long as there are that many."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from core.policy.allocation.slots import proportional, shares
from core.settings.registry import register
from core.system.command import COMMAND

Floats = npt.NDArray[np.float64]
EVEN = 1e-9  # value of a more even division: breaks ties only


@dataclass(frozen=True, slots=True, eq=False)
class AllocationInputs:
    """The inputs of a division. `least` [layers] = the fewest slots each layer can compute with."""

    experts: int
    top_k: int
    least: tuple[int, ...]
    counts: npt.NDArray[Any] | None = None  # [layers, experts] how often a profile saw each expert used
    gate_recall: npt.NDArray[Any] | None = None  # [layers] of the next-layer gate; NaN = cannot be predicted
    plan: tuple[float, ...] | None = None  # [layers] slots that a plan gives each layer of its budget


def gains(counts: npt.NDArray[Any]) -> Floats:
    """[L, E] share of a layer's requests that its 1st, 2nd ... slot serves when it holds the most used experts.

    In a layer that the profile never saw, all experts count alike."""
    some = np.where(counts.sum(1, keepdims=True) > 0, counts, 1).astype(np.float64)
    falling: Floats = -np.sort(-some, 1) / some.sum(1, keepdims=True)
    return falling


def hit_curves(counts: npt.NDArray[Any]) -> Floats:
    """[L, E + 1] hit rate of every layer when it holds its 0, 1 ... E most used experts."""
    gained = gains(counts).cumsum(1)
    gained[:, -1] = 1.0
    return np.concatenate([np.zeros((len(counts), 1)), gained], 1)


def greedy(gained: Floats, slots: int, least: Sequence[int]) -> list[int]:
    """Give slots one by one to the layer with the highest next gain; `gained` [L, E] must not increase along a layer.

    No division has a larger sum of gains. Ties: the layer with fewer slots first, then the earlier one."""
    layers, experts = gained.shape
    spare = slots - sum(least)
    if spare < 0:
        return shares(slots, layers)
    layer, rank = np.divmod(np.arange(layers * experts), experts)
    free = rank >= np.array(least)[layer]
    order = np.lexsort((layer, rank, -gained.reshape(-1)))
    taken = order[free[order]][:spare]
    return [int(n) for n in np.bincount(layer[taken], minlength=layers) + np.array(least)]


class Allocation:
    """The divisions with the largest sum of `value` [L, E + 1], by dynamic programming over layers, for every total.

    best_l(n) = max over c of best_{l-1}(n - c) + value[l, c]; among sums that differ by less than EVEN per layer, the
    most even division. O(layers^2 experts^2) steps in numpy rows; the table of choices is int16 [L, layers * experts +
    1]."""

    def __init__(self, value: Floats, least: Sequence[int]) -> None:
        layers, experts = value.shape[0], value.shape[1] - 1
        value = value - EVEN * (np.arange(experts + 1) / experts) ** 2
        self._least, total = tuple(least), layers * experts
        self._choice = np.zeros((layers, total + 1), np.int16)
        best = np.full(total + 1, -np.inf)
        best[0] = 0.0
        for layer in range(layers):
            top = layer * experts + 1  # largest total of the layers before, plus one
            after = np.full(total + 1, -np.inf)
            for c in range(least[layer], experts + 1):
                reached = after[c : c + top]
                offered = best[:top] + value[layer, c]
                better = offered > reached
                reached[better] = offered[better]
                self._choice[layer, c : c + top][better] = c
            best = after

    def __call__(self, slots: int) -> list[int]:
        """Slots of each layer."""
        layers = len(self._choice)
        if slots < sum(self._least):
            return shares(slots, layers)
        sizes: list[int] = []
        for layer in reversed(range(layers)):
            sizes.append(int(self._choice[layer, slots]))
            slots -= sizes[-1]
        return sizes[::-1]


def adapmoe_loads(curves: Floats, recall: npt.NDArray[Any], top_k: int) -> Floats:
    """[L, E + 1] expected number of on-demand loads of a token per layer, by slots (AdapMoE, its cache allocation).

    AdapMoE: m of the k experts are missing with hypergeometric probability, all experts being equally likely; while the
    layer before is computed, one of the missing is prefetched, correctly with probability beta. So m - beta of m >= 1
    remain: k (1 - t / E) - beta (1 - P0), P0 = product over i < k of (t - i) / (E - i), t = slots. Here t = E x the hit
    rate of a layer's `curves` [L, E + 1], which for equally likely experts equals the slots. Between whole t the
    probability of m >= 1 is limited to the expected m, as it must be."""
    experts = curves.shape[1] - 1
    beta = np.nan_to_num(np.asarray(recall, np.float64))[:, None]
    alike = experts * curves
    none_missing = np.ones_like(curves)
    for i in range(top_k):
        none_missing *= np.maximum(alike - i, 0.0) / (experts - i)
    missing = top_k * (1.0 - curves)
    loads: Floats = missing - beta * np.minimum(1.0 - none_missing, missing)
    return loads


class Division:
    """Base of the ways to divide. `needs`: the parts of a profile that it requires."""

    needs: ClassVar[tuple[str, ...]] = ()

    def __init__(self, facts: AllocationInputs) -> None:
        self.facts = facts

    def __call__(self, slots: int) -> list[int]:
        """Slots of each layer, `slots` in total."""
        return shares(slots, len(self.facts.least))


@register(
    "layer_slots",
    "uniform",
    title="Even",
    help="Every layer has as many slots as every other.",
    source="Mixtral-offloading (Eliseev and Mazur 2023)",
)
class Uniform(Division):
    """The base class unchanged."""


@register(
    "layer_slots",
    "profile",
    title="By use",
    help="Each slot goes to the layer where the next most used expert of a profile answers most requests, so that "
    "layers with a few favourites get few slots and layers that use all of their experts get many.",
    source="marginal gain of the static hit rate",
)
class ByUse(Division):
    """The division with the highest static hit rate on the profile's counts."""

    needs = ("counts",)

    def __call__(self, slots: int) -> list[int]:
        counts = self.facts.counts
        assert counts is not None
        return greedy(gains(counts), slots, self.facts.least)


@register(
    "layer_slots",
    "adapmoe",
    title="AdapMoE",
    help="The division with the fewest loads to expect, by dynamic "
    "programming over all divisions: a layer gains less from slots where a profile finds its next-layer gate to "
    "predict well, or few experts to do the work. It counts on the next-layer gate as prefetcher.",
    source="AdapMoE (Zhong et al. 2024), its cache allocation",
)
class AdapMoE(Division):
    """Minimises the sum of `adapmoe_loads`. Unlike the paper, hit rates come from the profile's counts and not from the
    slots alone, every token has k experts (skipping some is lossy), and a layer keeps at least what one token needs."""

    needs = ("counts", "gate_recall")

    def __init__(self, facts: AllocationInputs) -> None:
        super().__init__(facts)
        assert facts.counts is not None
        assert facts.gate_recall is not None
        loads = adapmoe_loads(hit_curves(facts.counts), facts.gate_recall, facts.top_k)
        self._best = Allocation(-loads, facts.least)

    def __call__(self, slots: int) -> list[int]:
        return self._best(slots)


@register(
    "layer_slots",
    "moepic",
    title="MoEpic's plan",
    help=f"As `{COMMAND} plan --save` divided them: by the waiting that a model of the machine's times and of the "
    "layers' hit rates expects. Another budget is divided in the same proportions.",
    source="MoEpic section 3.4, its algorithm 1",
)
class Planned(Division):
    """The plan's proportions. Its experts are whole here, whatever part of them the plan would keep."""

    needs = ("plan",)

    def __call__(self, slots: int) -> list[int]:
        assert self.facts.plan is not None
        return proportional(self.facts.plan, slots, self.facts.least, self.facts.experts)
