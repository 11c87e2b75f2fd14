"""Placement of experts from settings and a profile: slots of each layer, pinned experts, most used experts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from core.errors import SettingError
from core.policy.allocation.cache_plan import CachePlan
from core.policy.allocation.slots import proportional, shares
from core.policy.allocation.weights import AllocationInputs
from core.settings.cache import CacheSettings
from core.settings.config import KINDS, Settings, general
from core.settings.registry import create, variant
from core.system.command import COMMAND

HOW = f"run {COMMAND} calibrate, or open the Calibrate tab"
HOW_PLANNED = f"run {COMMAND} plan --save"
UNMEASURED = "needs a profile, and a text-to-text model cannot be calibrated. Choose one that needs none"
AHEAD = frozenset({"estimator", "gate_recall"})
"""Parts of a profile about what one MoE layer says of the next: a model with a single one has none."""


class AllocationProfile(Protocol):
    """The part of a profile (core.profile.Profile) that a placement needs."""

    @property
    def counts(self) -> npt.NDArray[Any] | None:
        """[layers, experts] number of uses of each expert."""

    @property
    def gate_recall(self) -> npt.NDArray[Any] | None:
        """[layers] recall@k of the next-layer gate; [0] is NaN."""

    @property
    def plan(self) -> CachePlan | None:
        """The plan that was saved with it."""

    def has(self, part: str) -> bool:
        """Whether it has a part: a name of core.profile.PARTS, or "plan"."""


def check_needs(settings: Settings, profile: AllocationProfile | None, *, measurable: bool = True) -> None:
    """Raises SettingError, with advice, when a chosen variant needs parts that the profile does not have. `measurable`:
    a profile of the model can be made."""
    for kind in KINDS:
        if kind != "substitute" or settings.lossy.substitutes:
            check_need(kind, str(settings[kind]), profile, measurable=measurable)


def check_need(kind: str, name: str, profile: AllocationProfile | None, *, measurable: bool = True) -> None:
    """Raises SettingError, with advice, when this variant needs parts that the profile does not have."""
    chosen = variant(kind, name)
    if lacks := [part for part in chosen.needs if profile is None or not profile.has(part)]:
        single = profile is not None and profile.counts is not None and len(profile.counts) < 2
        if single and AHEAD.intersection(lacks):
            raise SettingError(
                f"{general()[kind].title} “{chosen.title}” needs what one MoE layer says of the next, and this model "
                "has a single one. Choose another."
            )
        if not measurable:
            raise SettingError(f"{general()[kind].title} “{chosen.title}” {UNMEASURED}.")
        what = "" if profile is None else f" that has {' and '.join(lacks)}"
        raise SettingError(
            f"{general()[kind].title} “{chosen.title}” needs a profile of this model{what}: "
            f"{HOW_PLANNED if 'plan' in lacks else HOW}, then choose it again."
        )


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """`divide` maps the slots of all pools to slots per layer (even where one pool serves all layers); `pinned` are
    eids; `usual` [layers * experts] is how often a profile saw each expert, 0 without a profile; the slots of `transit`
    experts are set aside for bypass, or as the buffer of split experts, unless everything is resident. A slot holds one
    of the `blocks` of an expert; `tops` [layers] of them stay when others need slots."""

    layers: int
    experts: int
    top_k: int
    scope: str
    divide: Callable[[int], list[int]]
    pinned: frozenset[int]
    usual: npt.NDArray[np.float64]
    transit: int = 0
    blocks: int = 1
    tops: tuple[int, ...] = ()  # () = whole experts

    @classmethod
    def even(cls, layers: int, experts: int, top_k: int, scope: str) -> Placement:
        """The same number of slots for every layer, nothing pinned, and no profile."""
        return cls(
            layers, experts, top_k, scope, partial(shares, pools=layers), frozenset(), np.zeros(layers * experts)
        )

    def aside(self, slots: int) -> int:
        """Of that many slots, those that no pool gets."""
        return self.transit * self.blocks if slots < self.layers * self.experts * self.blocks else 0

    def sizes(self, slots: int) -> list[int]:
        """Slots of each pool."""
        rest = slots - self.aside(slots)
        return self.divide(rest) if self.scope == "layer" else [rest]

    def problem(self, slots: int) -> str:
        """Why that many slots are too few for bypass or the pinned experts, in the user's words, or ""."""
        least, aside = self.top_k * self.layers, self.aside(slots)
        if self.blocks > 1:
            return self._too_little(slots)
        if aside and slots - aside < least:
            return (
                f"Bypass sets {aside} slots aside, and a token needs {least}, but the budget pays for {slots}. Turn "
                "bypass off, or raise the budget."
            )
        return (
            pin_conflict(self.pinned, self.sizes(slots), self.layers * self.experts, self.top_k) if self.pinned else ""
        )

    def _too_little(self, slots: int) -> str:
        """The same of split experts, which are computed in the buffer where their layer has too few slots."""
        aside, one = self.aside(slots), self.blocks
        if slots < aside:
            return (
                f"The prefetch buffer of {self.transit} experts is larger than the budget, which pays for "
                f"{slots // one}. Choose a smaller one, or raise the budget."
            )
        pools = [size // one + aside // one for size in self.sizes(slots)]
        return pin_conflict(self.pinned, pools, self.layers * self.experts, self.top_k)


def place(
    settings: CacheSettings,
    layers: int,
    experts: int,
    top_k: int,
    profile: AllocationProfile | None,
    blocks: int = 1,
    heads: int = 0,
) -> Placement:
    """The placement by the settings, of experts in so many blocks. The layers of `heads` come after `layers`: nothing
    of theirs is pinned, and they get the slots of another last layer. Raises SettingError when a required profile is
    missing, or pins or the buffer do not fit the model."""
    scope, name = settings.scope, settings.layer_slots.name if settings.scope == "layer" else "uniform"
    check_need("layer_slots", name, profile)
    counts, recall = (profile.counts, profile.gate_recall) if profile is not None else (None, None)
    pinned = settings.pins.eids(layers, experts, counts)
    held = Counter(eid // experts for eid in pinned)
    needed = top_k if blocks == 1 else 0  # split experts can be computed in the buffer
    plan = profile.plan if profile is not None else None
    slots = plan.slots if plan is not None else None
    usual = np.zeros(layers * experts) if counts is None else np.asarray(counts, np.float64).ravel()
    if heads:
        counts, recall = (
            None if one is None else np.concatenate([one, *[one[-1:]] * heads]) for one in (counts, recall)
        )
        slots = None if slots is None else (*slots, *slots[-1:] * heads)
        layers, usual = layers + heads, np.concatenate([usual, np.zeros(heads * experts)])
    least = tuple(min(experts, needed + held[layer]) for layer in range(layers))
    divide = create("layer_slots", name, {}, facts=AllocationInputs(experts, top_k, least, counts, recall, slots))
    if blocks == 1:
        transit = top_k if settings.bypass and scope == "layer" else 0
        return Placement(layers, experts, top_k, scope, divide, pinned, usual, transit)
    check_need("split", settings.split.name, profile)
    tops = create("split", *settings.split, plan=plan).tops(layers, blocks)
    planned = plan.slots if plan is not None and name == "moepic" else None
    in_blocks = partial(_divided_in_blocks, divide, planned, blocks, layers, experts)
    buffer = prefetch_buffer(settings.buffer, top_k, blocks)
    return Placement(layers, experts, top_k, scope, in_blocks, pinned, usual, buffer, blocks, tuple(tops))


def prefetch_buffer(asked: int, top_k: int, blocks: int) -> int:
    """Experts of a budget that no layer gets, because experts in several blocks are prefetched and computed there;
    whole ones, in one block, need none. `asked`: the setting `buffer`, 0 = as many as a token uses in a layer (MoEpic
    section 3.2). Raises SettingError when a token's would not fit."""
    if blocks == 1:
        return 0
    if 0 < asked < top_k:
        raise SettingError(
            f"A prefetch buffer of {asked} experts is too small: a token uses {top_k} in a layer, and all of them may "
            f"be missing. Choose {top_k} or more, or 0."
        )
    return asked or top_k


def _divided_in_blocks(
    divide: Callable[[int], list[int]],
    planned: Sequence[float] | None,
    blocks: int,
    layers: int,
    experts: int,
    slots: int,
) -> list[int]:
    """Slots of each layer in the proportions that a plan says, or else that `divide` gives whole experts."""
    wanted = divide(slots // blocks) if planned is None else planned
    return proportional(wanted, slots, [0] * layers, experts * blocks)


def pin_conflict(pinned: Collection[int], capacities: list[int], total: int, top_k: int) -> str:
    """Why pinned experts leave a pool too few slots for the others that one token may need in a layer, or "". Pool i of
    `capacities` serves the i-th equal part of the `total` experts."""
    size = total // len(capacities)
    held = Counter(eid // size for eid in pinned)
    for pool, count in sorted(held.items()):
        left, others = capacities[pool] - count, min(top_k, size - count)
        if left < others:
            where = f"Layer {pool}" if len(capacities) > 1 else "The cache"
            return (
                f"{where} has {capacities[pool]} slots, of which {count} pinned experts leave {max(0, left)}, but "
                f"a token may need {others} others. Pin fewer experts, or raise the budget."
            )
    return ""
