"""Least frequently and recently used: frequency, worth less the longer an expert is unused."""

from typing import ClassVar

import numpy as np

from core.policy.eviction.base import Eviction, ExpertIndex, Floats, Ids
from core.settings.registry import register

HALF_LIFE = 8


@register(
    "eviction",
    "lfru",
    title="LFRU",
    help="Uses count, and are worth less the longer the expert is unused: half after one half-life, a third after "
    "two. The smallest worth leaves. It fades more slowly than LCP, and comes back in full with the next use.",
    source="frequency with recency decay; the hyperbola is that of hyperbolic caching (Blankstein et al. 2017)",
)
class LFRU(Eviction):
    """Worth: uses since the start / (1 + tokens since the last one / half-life). Score: worth / half-life, one division
    of whole numbers, so that equal worths are equal.

    Orders change with time: an expert of many uses is overtaken while it is idle. LCP fades exponentially."""

    time_dependent: ClassVar[bool] = True

    def __init__(self, expert_index: ExpertIndex, half_life: int = HALF_LIFE) -> None:
        """After `half_life` tokens without use an expert is worth half."""
        super().__init__(expert_index)
        self._half_life = float(half_life)
        self._uses: Floats = np.zeros(expert_index.size)
        self._last: Floats = np.zeros(expert_index.size)  # `now` at the last use

    def admitted(self, ids: Ids, tick: Ids, now: int) -> None:
        self.score[ids] = self._uses[ids]

    def used(self, ids: Ids, tick: Ids, now: int) -> None:
        uses = self._uses[ids] + 1.0
        self.score[ids] = self._uses[ids] = uses
        self._last[ids] = now

    def scores(self, part: slice, now: int, layer: Ids) -> Floats:
        return self.score[part] / (self._half_life + (now - self._last[part]))
