"""Least frequently used: the policy of MoE-Infinity's cache."""

import numpy as np

from core.policy.eviction.base import RECENT, Eviction, ExpertIndex, Floats, Ids
from core.settings.registry import register


@register(
    "eviction",
    "lfu",
    title="LFU",
    help="The expert used least often leaves; among equals the one unused for longest.",
    source="MoE-Infinity (Xue et al. 2024)",
)
class LFU(Eviction):
    """Score: uses since the start, counted on across evictions, plus a fraction for the tick of the last one."""

    def __init__(self, expert_index: ExpertIndex) -> None:
        super().__init__(expert_index)
        self._count: Floats = np.zeros(expert_index.size)

    def admitted(self, ids: Ids, tick: Ids, now: int) -> None:
        self.score[ids] = self._count[ids] + tick * RECENT

    def used(self, ids: Ids, tick: Ids, now: int) -> None:
        count = self._count[ids] + 1.0
        self._count[ids] = count
        self.score[ids] = count + tick * RECENT
