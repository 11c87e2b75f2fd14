"""What a frame tells of prefetching: sums over the last passes, and the net figure of decoded tokens alone."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest

from core.runtime.telemetry import FOLD, RING, WINDOW, Telemetry
from core.types import Frame, Memory, ModelShape, StepRecord

SHAPE = ModelShape(layers=1, experts=2, top_k=1, hidden=4, expert_bytes=8)


def step(index: int, phase: Any, **values: Any) -> StepRecord:
    ids, none = np.zeros((1, 1, 1), np.int16), np.zeros(0, np.int16)
    return StepRecord(index, phase, 1, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0, ids, none, none, none.astype(np.uint8), **values)


def frame(telemetry: Telemetry) -> Frame:
    return telemetry.frame(0, 10, [0, 0], Memory(*[0] * 10), busy=False, emulated=False, link_peak_gbps=1.0)


def test_prefetching_over_the_window() -> None:
    telemetry = Telemetry(SHAPE)
    assert (frame(telemetry).net_ms, frame(telemetry).prefetched) == (0.0, (0, 0, 0, 0))
    telemetry.add(step(0, "prefill", net_ms=100.0, prefetch_used=5))
    for index in range(1, 4):
        telemetry.add(
            step(
                index,
                "decode",
                net_ms=index - 4.0,
                prefetch_used=3,
                prefetch_late=2,
                prefetch_wasted=2,
                prefetch_evicted=1,
            )
        )
    assert frame(telemetry).net_ms == pytest.approx(-2.0)  # the mean of -3, -2 and -1
    assert frame(telemetry).prefetched == (14, 6, 6, 3)
    for index in range(WINDOW):
        telemetry.add(step(4 + index, "decode"))
    assert (frame(telemetry).net_ms, frame(telemetry).prefetched) == (0.0, (0, 0, 0, 0))


def test_the_predictors_own_time_of_each_pass() -> None:
    telemetry = Telemetry(SHAPE)
    for index, spent_ms in enumerate((0.25, 0.0, 0.5)):
        telemetry.add(step(index, "decode", predict_ms=spent_ms))
    assert frame(telemetry).predict_ms.tolist() == [0.25, 0.0, 0.5]


def test_what_is_kept_of_passes_is_bounded_whether_or_not_anybody_looks() -> None:
    telemetry, before = Telemetry(SHAPE), _alive()
    for index in range(2 * RING + 2 * FOLD):
        telemetry.add(step(index, "decode"))
    assert _alive() - before <= RING + FOLD <= 1024
    assert frame(telemetry).step.tolist() == list(range(2 * RING + 2 * FOLD - 10, 2 * RING + 2 * FOLD))
    assert _alive() - before <= RING


def _alive() -> int:
    return sum(isinstance(one, StepRecord) for one in gc.get_objects())
