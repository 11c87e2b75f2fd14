"""A record's arrays are built when they are read, and are what was recorded, whoever reads them and how often."""

from __future__ import annotations

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np

from core.cache.lease import Counts, LeasedSegment
from core.runtime.batch import Batch, Share
from core.runtime.recorder import Recorder
from core.types import ModelShape, Outcome, Segment, StepRecord

SHAPE = ModelShape(layers=2, experts=300, top_k=2, hidden=8, expert_bytes=64)
IDS = [[[299, 4], [4, 7]], [[1, 0], [0, 299]]]
BATCH = Batch("prefill", (Share([11, 12], request=5),))


class Slot:
    """Something that a record must not keep alive."""


def record(recorder: Recorder, slot: Any) -> StepRecord:
    recorder.begin(BATCH)
    for layer, rows in enumerate(IDS):
        wanted = sorted({expert for row in rows for expert in row})
        recorder.layer(
            layer,
            rows,
            [LeasedSegment(e, Segment(layer * 300 + e, range(1)), [slot], Outcome(e % 4), None) for e in wanted],
        )
    return recorder.end(0.0, 0.01, 1, 1, {})


def make() -> Recorder:
    ticket = SimpleNamespace(eid=301, bytes=64, demand=True, submitted_s=1.0, started_s=2.0, landed_s=3.0, disk_bytes=0)
    expert_cache = SimpleNamespace(take_counts=Counts, capacity=3)
    transfers: Any = SimpleNamespace(take_finished=lambda: [ticket], device_stall_s=lambda: (0.0, 0.0), pace=None)
    return Recorder(SHAPE, expert_cache, transfers)  # type: ignore[arg-type]


def check(step: StepRecord) -> None:
    assert (step.phase, step.tokens, step.rows) == ("prefill", 2, ((5, 2),))
    assert step.ids.dtype == step.layer.dtype == step.expert.dtype == np.int16
    assert step.outcome.dtype == np.uint8
    assert step.ids.tolist() == IDS
    assert step.layer.tolist() == [0, 0, 0, 1, 1, 1]
    assert step.expert.tolist() == [4, 7, 299, 0, 1, 299]
    assert step.outcome.tolist() == [0, 3, 3, 0, 1, 3]
    assert (step.requests, step.hits) == (6, 3)
    assert [(t.layer, t.expert, t.demand, t.origin) for t in step.transfers] == [(1, 1, True, "host")]
    assert abs(step.copy_ms - 1000) < 1e-6


def test_what_was_recorded_is_what_is_read_later() -> None:
    recorder = make()
    first = record(recorder, None)
    record(recorder, None)
    check(first)
    check(first)
    assert first.ids is first.ids


def test_threads_that_read_at_once_see_the_same() -> None:
    recorder = make()
    with ThreadPoolExecutor(8) as pool:
        for _ in range(200):
            step = record(recorder, None)
            for done in [pool.submit(check, step) for _ in range(4)]:
                done.result()


def test_a_record_keeps_no_slot_alive() -> None:
    recorder, slot = make(), Slot()
    alive = weakref.ref(slot)
    step = record(recorder, slot)
    recorder.begin(BATCH)
    del slot
    gc.collect()
    assert alive() is None
    check(step)


def test_nothing_is_noted_while_telemetry_is_off() -> None:
    recorder = make()
    recorder.enabled = False
    step = record(recorder, None)
    assert (step.ids.shape, step.requests, step.transfers) == ((0, 2, 2), 0, ())
    step.ids = np.zeros((1, 2, 2), np.int16)  # still a plain record
    assert step.ids.shape == (1, 2, 2)
