"""Predictive locality-aware expert caching: keeps experts of the coming layers, evicts those of passed layers first."""

from typing import ClassVar

import numpy as np

from core.policy.eviction.base import RECENT, Eviction, ExpertIndex, Floats, Ids
from core.settings.registry import register


@register(
    "eviction",
    "plec",
    title="PLEC",
    help="Experts of layers already passed in this token leave first, of these the ones prefetched in vain before "
    "those that were used; then those of coming layers that no prefetcher named, the furthest first; named ones stay "
    "longest. Meant for scope global with a prefetcher; without one, only the order of the layers counts.",
    source="ExpertFlow sections 3.2.1 and 3.2.2",
)
class PLEC(Eviction):
    """Score: L x class - layers to go + a fraction for the tick of the last use; class -1 = passed, not predicted and
    not requested since it got its slot, 0 = passed and not predicted, 1 = passed, predicted for the next token, 2 =
    ahead, 3 = ahead and predicted. Layers to go are below L."""

    time_dependent: ClassVar[bool] = True
    uses_hints: ClassVar[bool] = True

    def __init__(self, expert_index: ExpertIndex) -> None:
        super().__init__(expert_index)
        self._idle = np.zeros(expert_index.size, np.bool_)  # not requested since it got its slot

    def admitted(self, ids: Ids, tick: Ids, now: int) -> None:
        self.score[ids] = tick * RECENT
        self._idle[ids] = True

    def used(self, ids: Ids, tick: Ids, now: int) -> None:
        self.score[ids] = tick * RECENT
        self._idle[ids] = False

    def scores(self, part: slice, now: int, layer: Ids) -> Floats:
        expert_index = self.expert_index
        own = expert_index.layer_of[part]
        in_vain = self._idle[part] & ~expert_index.predicted[part]
        if layer is not expert_index.layer_of:  # else every layer is computed for itself: all are passed
            in_vain &= own <= layer
        scores: Floats = self.score[part] + self.cached_static_score(part, layer)
        scores[in_vain] -= expert_index.layers
        return scores

    def static_score(self, part: slice, layer: Ids) -> Floats:
        expert_index = self.expert_index
        kind = expert_index.predicted[part].astype(np.float64)
        kind += 2.0 * (expert_index.layer_of[part] > layer)
        kind *= expert_index.layers
        kind -= expert_index.distance(part, layer)
        return kind
