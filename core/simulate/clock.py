"""A virtual clock: what the misses of a trace would cost on a link, in milliseconds per token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Clock:
    """Times of one machine and model. TPOT = compute + stall; without prefetching the link works on demand alone."""

    compute_ms: float   # of a token with everything resident
    load_ms: float      # one expert over the link
    expert_ms: float    # of that compute, one expert's product: what is resident is computed while copies are under way

    def stall_ms(self, needed: int, missing: int) -> float:
        """Waiting in one layer: the copies come one after the other; those resident are computed first, then each
        missing one when it lands."""
        free = computed = max(0, needed - missing) * self.expert_ms
        for copy in range(1, missing + 1):
            computed = max(computed, copy * self.load_ms) + self.expert_ms
        return max(0.0, computed - free - missing * self.expert_ms) if missing else 0.0

    def tpot_ms(self, by_misses: npt.NDArray[Any]) -> float:
        """Mean milliseconds per token; `by_misses` [layers, k + 1] = tokens that missed 0 ... k experts there."""
        tokens = int(by_misses[0].sum())
        k = by_misses.shape[1] - 1
        stall = np.array([self.stall_ms(k, missing) for missing in range(k + 1)])
        return self.compute_ms + float((by_misses * stall).sum()) / tokens if tokens else 0.0
