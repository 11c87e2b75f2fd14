"""Least frequently used, optionally with decay: the policy of MoE-Infinity's cache."""

from __future__ import annotations

from typing import Annotated

import numpy as np

from core.policy.eviction.base import RECENT, Eviction, ExpertIndex, Floats, Ids
from core.settings.param import Param
from core.settings.registry import register


@register(
    "eviction",
    "lfu",
    title="LFU",
    help="The expert used least often leaves; among equals the one unused for "
    "longest. With a half-life, old uses count less and less.",
    source="MoE-Infinity (Xue et al. 2024)",
)
class LFU(Eviction):
    """Score: uses since the start, counted on across evictions, plus a fraction for the tick of the last one.

    With a half-life h the count is sum 2^(t / h) over the tokens t of its uses: later uses weigh more, which orders
    experts as halving all older ones would, without updating them. Stored as its logarithm, it cannot overflow.
    """

    def __init__(
        self,
        expert_index: ExpertIndex,
        half_life: Annotated[
            int,
            Param(
                "After this many tokens a use counts half. 0 = never forgets.",
                title="Half-life",
                low=0,
                high=100_000,
                step=1,
                unit="tokens",
            ),
        ] = 0,
    ) -> None:
        super().__init__(expert_index)
        self._half_life = half_life
        self._count: Floats = np.full(expert_index.size, -1e300) if half_life else np.zeros(expert_index.size)

    def admitted(self, ids: Ids, tick: Ids, now: int) -> None:
        self.score[ids] = self._count[ids] if self._half_life else self._count[ids] + tick * RECENT

    def used(self, ids: Ids, tick: Ids, now: int) -> None:
        if self._half_life:
            count = np.logaddexp2(self._count[ids], now / self._half_life)
            self.score[ids] = self._count[ids] = count
        else:
            count = self._count[ids] + 1.0
            self._count[ids] = count
            self.score[ids] = count + tick * RECENT
