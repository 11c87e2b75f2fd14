"""A virtual clock: what the misses of a trace would cost on a link, in milliseconds per token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Clock:
    """Times of one machine and model. TPOT = compute + stall; without prefetching the link works on demand alone.

    To be measured there: `compute_ms` with everything resident, `load_ms` from the link, `miss_ms` from how much longer
    than `compute_ms` the engine computes (its own compute_ms) with a budget that makes it miss, per miss.
    """

    compute_ms: float  # of a token with everything resident
    load_ms: float  # one expert over the link
    expert_ms: float  # of that compute, one expert's product: what is resident is computed while copies are under way
    miss_ms: float = 0.0  # what a miss costs the computing thread beside its copy: eviction, a product of its own
    head_ms: float = 0.0  # of that compute, what is outside the layers; the rest is spread over them evenly
    predict_ms: float = 0.0  # a predictor's own time in one layer, on the computing thread; not in compute_ms

    def layer_ms(self, layers: int, top_k: int) -> float:
        """Of computing, a layer's part without its experts: attention and router."""
        return max(0.0, (self.compute_ms - self.head_ms) / layers - top_k * self.expert_ms)

    def stall_ms(self, needed: int, missing: int) -> float:
        """Waiting in one layer: the copies come one after the other; those resident are computed first, then each
        missing one when it lands."""
        busy = done = max(0, needed - missing) * self.expert_ms
        for copy in range(1, missing + 1):
            busy += self.expert_ms + self.miss_ms
            done = max(done, copy * self.load_ms) + self.expert_ms + self.miss_ms
        return done - busy

    def tpot_ms(self, by_misses: npt.NDArray[Any]) -> float:
        """Mean milliseconds per token; `by_misses` [layers, k + 1] = tokens that missed 0 ... k experts there."""
        tokens = int(by_misses[0].sum())
        k = by_misses.shape[1] - 1
        cost = np.array([self.stall_ms(k, missing) + missing * self.miss_ms for missing in range(k + 1)])
        return self.compute_ms + float((by_misses * cost).sum()) / tokens if tokens else 0.0
