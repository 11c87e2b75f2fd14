"""A record's arrays are built when they are read, and are what was recorded, whoever reads them and how often."""

import copy
import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.cache.counts import Counts
from core.cache.lease import LeasedSegment
from core.runtime import recorder as recorder_module
from core.runtime.batch import Batch, Share
from core.runtime.recorder import LONG_S, Recorder
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


def test_a_long_pass_is_seen_while_it_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder, now_s = make(), [100.0]
    monkeypatch.setattr(recorder_module.time, "perf_counter", lambda: now_s[0])
    recorder._transfers.untaken_bytes = lambda: (640, 4096)  # type: ignore[method-assign]
    assert recorder.underway() is None
    recorder.begin(BATCH)
    now_s[0] += LONG_S / 2
    assert recorder.underway() is None, "a token's pass is over before it could be read"
    now_s[0] += LONG_S
    recorder.layer(0, IDS[0], [])
    assert recorder.underway() == (pytest.approx(1.5 * LONG_S), 2, 1, 640, 4096)
    recorder.end(0.0, 0.01, 1, 1, {})
    assert recorder.underway() is None


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


def token(recorder: Recorder, *layers: tuple[list[int], list[Outcome] | None]) -> StepRecord:
    """The record of a pass over one token, whose layers chose these experts with these outcomes; None = all hits."""
    recorder.begin(Batch("decode", (Share([11]),)))
    for layer, (ids, outcomes) in enumerate(layers):
        requests = outcomes and [
            LeasedSegment(expert, Segment(layer * 300 + expert, range(1)), [], outcome, None)
            for expert, outcome in zip(ids, outcomes, strict=True)
        ]
        recorder.layer(layer, [ids], requests)
    return recorder.end(0.0, 0.01, 1, 1, {})


LAYERS = st.tuples(*[st.tuples(st.lists(st.integers(0, 299), min_size=2, max_size=2, unique=True), st.booleans())] * 2)


@given(LAYERS)
def test_hits_that_are_not_named_one_by_one_are_recorded_like_those_that_are(layers: Any) -> None:
    hits = [Outcome.HIT, Outcome.HIT]
    brief = token(make(), *[(ids, None if rests else hits) for ids, rests in layers])
    whole = token(make(), *[(ids, hits) for ids, _ in layers])
    for name in ("ids", "layer", "expert", "outcome"):
        mine, full = getattr(brief, name), getattr(whole, name)
        assert mine.dtype == full.dtype and mine.tolist() == full.tolist()
    assert (brief.requests, brief.hits, brief.assignments) == (4, 4, 4)


def test_hits_beside_a_miss() -> None:
    step = token(make(), ([7, 3], [Outcome.MISS, Outcome.HIT]), ([299, 0], None))
    assert step.layer.tolist() == [0, 0, 1, 1] and step.expert.tolist() == [7, 3, 299, 0]
    assert step.outcome.tolist() == [Outcome.MISS, Outcome.HIT, Outcome.HIT, Outcome.HIT]


def test_a_pass_of_which_some_layers_ran_has_their_requests_and_no_ids() -> None:
    step = token(make(), ([7, 3], None))
    assert step.ids.shape == (0, 1, 2) and step.layer.tolist() == [0, 0] and step.expert.tolist() == [7, 3]


def test_every_field_can_be_read_and_copied() -> None:
    step = record(make(), None)
    other = copy.deepcopy(step)
    for one in fields(StepRecord):
        assert np.array_equal(getattr(other, one.name), getattr(step, one.name)), one.name
    assert (other.exact, other.changes, other.lossy, other.prefetch_used) == (True, {}, None, 0)


def test_a_record_keeps_no_copy_alive() -> None:
    recorder, ticket = make(), Slot()
    alive = weakref.ref(ticket)
    counts = Counts()
    counts.prefetch_late, counts.spared, counts.lost = 3, [ticket], [ticket]  # type: ignore[list-item]
    recorder._expert_cache = SimpleNamespace(take_counts=lambda: counts, capacity=3)  # type: ignore[assignment]
    ticket.error = "failed"  # type: ignore[attr-defined]
    step = record(recorder, None)
    del ticket
    gc.collect()
    assert alive() is None and step.prefetch_late == 3


@pytest.mark.parametrize("predicts", [False, True])
def test_prefetching_is_judged_while_something_predicts(predicts: bool) -> None:
    recorder, judged = make(), list[object]()
    recorder._throttle = SimpleNamespace(note=judged.append)  # type: ignore[assignment]
    waits = SimpleNamespace(passed=lambda stall_s, spared_s: judged.append(stall_s))
    recorder._predictor_host = SimpleNamespace(predicts=predicts, answer_wait=waits)  # type: ignore[assignment]
    step = record(recorder, None)
    assert judged == ([0.0, step] if predicts else [])


def test_nothing_is_noted_while_telemetry_is_off() -> None:
    recorder = make()
    recorder.enabled = False
    step = record(recorder, None)
    assert (step.ids.shape, step.requests, step.transfers) == ((0, 2, 2), 0, ())
    step.ids = np.zeros((1, 2, 2), np.int16)  # still a plain record
    assert step.ids.shape == (1, 2, 2)
