"""The bounds beside every figure: Belady's misses as counted by itself, and copies hidden behind computing."""

from __future__ import annotations

import numpy as np
import pytest

from bench.bounds import belady_misses_per_token, overlapped_ms
from core.memory.link import Pace, scaled_gbps
from tests.simulate.belady import belady_misses


@pytest.mark.parametrize("slots", [9, 10, 20, 24])
def test_misses_are_those_of_each_layer_with_its_share(slots: int) -> None:
    rng = np.random.default_rng(0)
    ids = np.array([[rng.choice(8, 3, replace=False) for _ in range(40)] for _ in range(3)])
    shares = [slots // 3 + (layer < slots % 3) for layer in range(3)]
    counted = sum(belady_misses(of.tolist(), share) for of, share in zip(ids, shares, strict=True))
    assert belady_misses_per_token(ids, 8, slots) == counted / 40


def test_the_overlap_bound_and_the_scaled_link_are_their_formulas() -> None:
    pace = Pace(gbps=1.0, latency_us=0.0)
    assert overlapped_ms(2.0, 3.0, 1_000_000, pace) == 3.0
    assert overlapped_ms(5.0, 3.0, 1_000_000, pace) == 5.0
    assert scaled_gbps(layer_ms=1.0, size_bytes=770_000, latency_us=0.0) == 1.0
