"""Placement of experts from settings and a profile: slots of each layer, pinned experts, most used experts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from core.errors import SettingError
from core.policy.allocation.cache_plan import CachePlan
from core.policy.allocation.weights import AllocationInputs
from core.settings.cache import CacheSettings
from core.settings.config import KINDS, Settings, general
from core.settings.registry import create, variant

HOW = "run python launch.py calibrate, or open the Calibrate tab"
HOW_PLANNED = "run python launch.py plan --save"


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


def check_needs(settings: Settings, profile: AllocationProfile | None) -> None:
    """Raises SettingError, with advice, when a chosen variant needs parts that the profile does not have."""
    for kind in KINDS:
        if kind != "substitute" or settings.lossy.substitutes:
            check_need(kind, str(settings[kind]), profile)


def check_need(kind: str, name: str, profile: AllocationProfile | None) -> None:
    """Raises SettingError, with advice, when this variant needs parts that the profile does not have."""
    chosen = variant(kind, name)
    if lacks := [part for part in chosen.needs if profile is None or not profile.has(part)]:
        what = "" if profile is None else f" that has {' and '.join(lacks)}"
        raise SettingError(
            f"{general()[kind].title} “{chosen.title}” needs a profile of this model{what}: "
            f"{HOW_PLANNED if 'plan' in lacks else HOW}, then choose it again."
        )


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """`divide` maps the slots of all pools to slots per layer (even where one pool serves all layers); `pinned` are
    eids; `usual` [layers * experts] is how often a profile saw each expert, 0 without a profile; `transit` slots are
    set aside for bypass, unless everything is resident."""

    layers: int
    experts: int
    top_k: int
    scope: str
    divide: Callable[[int], list[int]]
    pinned: frozenset[int]
    usual: npt.NDArray[np.float64]
    transit: int = 0

    def aside(self, slots: int) -> int:
        """Of that many slots, those that no pool gets."""
        return self.transit if slots < self.layers * self.experts else 0

    def sizes(self, slots: int) -> list[int]:
        """Slots of each pool."""
        rest = slots - self.aside(slots)
        return self.divide(rest) if self.scope == "layer" else [rest]

    def problem(self, slots: int) -> str:
        """Why that many slots are too few for bypass or the pinned experts, in the user's words, or ""."""
        least, aside = self.top_k * self.layers, self.aside(slots)
        if aside and slots - aside < least:
            return (
                f"Bypass sets {aside} slots aside, and a token needs {least}, but the budget pays for {slots}. Turn "
                "bypass off, or raise the budget."
            )
        return crowded(self.pinned, self.sizes(slots), self.layers * self.experts, self.top_k) if self.pinned else ""


def place(
    settings: CacheSettings, layers: int, experts: int, top_k: int, profile: AllocationProfile | None
) -> Placement:
    """The placement by the settings. Raises SettingError when a required profile is missing, or pins do not fit the
    model."""
    scope, name = settings.scope, settings.layer_slots.name if settings.scope == "layer" else "uniform"
    check_need("layer_slots", name, profile)
    counts, recall = (profile.counts, profile.gate_recall) if profile is not None else (None, None)
    pinned = settings.pins.eids(layers, experts, counts)
    held = Counter(eid // experts for eid in pinned)
    least = tuple(min(experts, top_k + held[layer]) for layer in range(layers))
    plan = profile.plan.slots if profile is not None and profile.plan is not None else None
    divide = create("layer_slots", name, {}, facts=AllocationInputs(experts, top_k, least, counts, recall, plan))
    usual = np.zeros(layers * experts) if counts is None else np.asarray(counts, np.float64).ravel()
    transit = top_k if settings.bypass and scope == "layer" else 0
    return Placement(layers, experts, top_k, scope, divide, pinned, usual, transit)


def crowded(pinned: Collection[int], capacities: list[int], total: int, top_k: int) -> str:
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
