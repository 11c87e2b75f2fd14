"""Bounds on any cache and any prefetcher: Belady's misses on the same tokens, and the link's own speed."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from core.memory.link import Pace
from core.simulate import BELADY, Config, simulate
from core.trace import ArrayTrace


def belady_misses_per_token(ids: npt.NDArray[Any], experts: int, slots: int) -> float:
    """Fewest misses per token of any eviction policy on `ids` [L, T, k], each layer with its even share of `slots`. The
    first miss of each expert is left out: a cache that was filled before need not have it."""
    trace = ArrayTrace(np.ascontiguousarray(ids.transpose(1, 0, 2)), experts)
    (best,) = simulate(trace, [Config(BELADY, slots)], processes=1)
    return (best.requests - best.hits - best.compulsory) / trace.tokens


def overlapped_ms(compute_ms: float, copies: float, size_bytes: int, pace: Pace) -> float:
    """TPOT if every copy were hidden behind compute as far as the link allows: the longer of the two."""
    return max(compute_ms, copies * pace.duration_s(size_bytes) * 1e3)
