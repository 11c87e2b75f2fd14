"""FineMoE's eviction: rarely used experts that are unlikely to be used are evicted first."""

from typing import ClassVar

import numpy as np

from core.policy.eviction.base import Eviction, ExpertIndex, Floats, Ids
from core.settings.registry import register


@register(
    "eviction",
    "finemoe",
    title="FineMoE",
    help="The expert with the smallest product of probability and number of uses leaves; how recent a use was does "
    "not count. The probabilities are those of the newest map found by the prefetcher Expert maps; before and without "
    "it the profile's shares, and without a profile it is LFU.",
    source="FineMoE section 4.5",
)
class FineMoE(Eviction):
    """The paper evicts the largest 1 / (p x freq). Score: p x freq, p = `Hints.probability`, freq = uses since the
    start plus one, so that p still ranks prefetched experts that were not used yet. Before any map, of which the paper
    says nothing, p is the profile's share of the layer's uses, else 1 / E: on the scale of a map's probabilities."""

    time_dependent: ClassVar[bool] = True
    uses_hints: ClassVar[bool] = True

    def __init__(self, expert_index: ExpertIndex) -> None:
        super().__init__(expert_index)
        self._uses: Floats = np.ones(expert_index.size)

    def admitted(self, ids: Ids, tick: Ids, now: int) -> None:
        self.score[ids] = self._uses[ids]

    def used(self, ids: Ids, tick: Ids, now: int) -> None:
        uses = self._uses[ids] + 1.0
        self.score[ids] = self._uses[ids] = uses

    def scores(self, part: slice, now: int, layer: Ids) -> Floats:
        return self.score[part] * self.expert_index.probability[part]
