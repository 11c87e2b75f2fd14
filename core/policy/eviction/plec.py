"""Predictive locality-aware expert caching: keeps experts of the coming layers, evicts those of passed layers first."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from core.policy.eviction.base import RECENT, Eviction, Floats, Ids
from core.settings.registry import register


@register(
    "eviction",
    "plec",
    title="PLEC",
    help="Experts of layers already passed in this token leave first, then "
    "those of coming layers that no prefetcher named, the furthest first; named ones stay longest. Meant for "
    "scope global with a prefetcher; without one, only the order of the layers counts.",
    source="ExpertFlow section 3.2.1",
)
class PLEC(Eviction):
    """Score: L x class - layers to go + a fraction for the tick of the last use; class 0 = passed and not predicted,
    1 = passed, predicted for the next token, 2 = ahead, 3 = ahead and predicted. Layers to go are below L."""

    time_dependent: ClassVar[bool] = True
    uses_hints: ClassVar[bool] = True

    def admitted(self, ids: Ids, tick: Ids, now: int) -> None:
        self.score[ids] = tick * RECENT

    def used(self, ids: Ids, tick: Ids, now: int) -> None:
        self.score[ids] = tick * RECENT

    def scores(self, part: slice, now: int, layer: Ids) -> Floats:
        return self.score[part] + self.cached_static_score(part, layer)

    def static_score(self, part: slice, layer: Ids) -> Floats:
        expert_index = self.expert_index
        kind = expert_index.predicted[part].astype(np.float64)
        kind += 2.0 * (expert_index.layer_of[part] > layer)
        kind *= expert_index.layers
        kind -= expert_index.distance(part, layer)
        return kind
