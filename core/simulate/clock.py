"""A virtual clock: what the misses of a trace would cost on a link, in milliseconds per token."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Clock:
    """Times of one machine and model. TPOT = compute + stall; without prefetching the link carries demand copies alone.

    To be measured on that machine: `compute_ms` with every expert resident; `load_ms` from the link; `miss_ms` = (the
    engine's compute_ms with a budget that makes it miss - `compute_ms`) / misses per token."""

    compute_ms: float  # per token, with every expert resident
    load_ms: float  # one expert over the link
    expert_ms: float  # of that compute, one expert's product; resident experts are computed while copies are in flight
    miss_ms: float = 0.0  # computing thread's cost per miss besides the copy: eviction, a separate product
    head_ms: float = 0.0  # of that compute, the part outside the layers; the rest is spread evenly over the layers
    predict_ms: float = 0.0  # a predictor's time per layer on the computing thread; not in compute_ms

    def layer_ms(self, layers: int, top_k: int) -> float:
        """Compute of one layer without its experts: attention and router."""
        return max(0.0, (self.compute_ms - self.head_ms) / layers - top_k * self.expert_ms)

    def stall_ms(self, needed: int, missing: int) -> float:
        """Stall in one layer. Copies run one after the other; resident experts are computed first, then each missing
        one when its copy has landed."""
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
