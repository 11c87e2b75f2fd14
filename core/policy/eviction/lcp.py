"""Least cache priority: combines frequency and recency of use."""

import math
from functools import cache
from typing import Annotated, ClassVar

import numpy as np
import numpy.typing as npt

from core.policy.eviction.base import Eviction, ExpertIndex, Floats, Ids
from core.settings.param import Param
from core.settings.registry import register


@register(
    "eviction",
    "lcp",
    title="LCP",
    help="Uses count, and fade while an expert is unused: its priority is its uses x rho^(tokens unused / window), and "
    "the smallest is evicted. Every token that chooses an expert is a use. Between LFU (rho near 1) and LRU (near 0).",
    source="MoEpic section 3.3, equation 4",
)
class LCP(Eviction):
    """P = mu x rho^(nu / omega), mu = tokens that activated the expert, nu = tokens since the last one did: each token
    of a prompt counts in both.

    Score: log2 P + now / omega x log2(1 / rho). It orders experts at any time as P does, since it omits only a term
    that all share; and it stays constant while an expert is unused: log2 mu + last use x log2(1 / rho) / omega."""

    counts_tokens: ClassVar[bool] = True

    def __init__(
        self,
        expert_index: ExpertIndex,
        rho: Annotated[
            float,
            Param(
                "What is left of a priority after one window without use.", title="Rho", low=0.01, high=0.99, step=0.01
            ),
        ] = 0.25,
        omega: Annotated[
            int, Param("Length of that window.", title="Window", low=1, high=10_000, step=1, unit="tokens")
        ] = 128,
    ) -> None:
        super().__init__(expert_index)
        self._fade = math.log2(1.0 / rho) / omega
        self._uses: npt.NDArray[np.int64] = np.zeros(expert_index.size, np.int64)
        self._log2 = _logarithms()
        self._priority: Floats = np.full(expert_index.size, -1e300)  # score at the last use; also of non-residents

    def admitted(self, ids: Ids, tick: Ids, now: int) -> None:
        self.score[ids] = self._priority[ids]

    def chosen(self, ids: Ids, tokens: Ids) -> None:
        self._uses[ids] += tokens - 1  # the request adds the last one

    def used(self, ids: Ids, tick: Ids, now: int) -> None:
        uses = self._uses[ids] + 1
        self._uses[ids] = uses
        self.score[ids] = self._priority[ids] = self._log2.take(uses, mode="clip") + now * self._fade


@cache
def _logarithms() -> Floats:
    """log2 of 0 (never used) to a million. A table gives identical values for one expert and for many. More uses count
    as a million."""
    return np.log2(np.maximum(np.arange(2**20), 1))
