"""What a frame tells of prefetching: sums over the last passes, and the net figure of decoded tokens alone."""

import gc
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from core.metrics.limit import PARTS
from core.runtime.telemetry import FOLD, RING, WINDOW, Telemetry, Timelines
from core.types import Frame, Memory, ModelShape, Outcome, StepRecord
from tests.selection import layered

TIMES = ("started_s", "total_ms", "compute_ms", "stall_ms", "idle_ms", "copy_ms", "predict_ms", "net_ms")
COUNTS = (
    "demand_bytes",
    "prefetch_bytes",
    "wasted_bytes",
    "disk_bytes",
    "prefetch_used",
    "prefetch_late",
    "prefetch_wasted",
    "prefetch_evicted",
)
SHAPE = ModelShape(layers=1, experts=2, top_k=1, hidden=4, expert_bytes=8)


def step(index: int, phase: Any, **values: Any) -> StepRecord:
    ids, none = np.zeros((1, 1, 1), np.int16), np.zeros(0, np.int16)
    return StepRecord(index, phase, 1, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0, ids, none, none, none.astype(np.uint8), **values)


def frame(telemetry: Telemetry, shape: ModelShape = SHAPE, points: int = 10) -> Frame:
    places = [0] * shape.total
    return telemetry.frame(0, points, places, Memory(*[0] * 10), busy=False, emulated=False, link_limit_gbps=1.0)


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
    assert frame(telemetry).prefetched == (9, 6, 6, 3), "of decoded tokens, as the net figure is"
    for index in range(WINDOW):
        telemetry.add(step(4 + index, "decode"))
    assert (frame(telemetry).net_ms, frame(telemetry).prefetched) == (0.0, (0, 0, 0, 0))


def test_the_predictors_own_time_of_each_pass() -> None:
    telemetry = Telemetry(SHAPE)
    for index, spent_ms in enumerate((0.25, 0.0, 0.5)):
        telemetry.add(step(index, "decode", predict_ms=spent_ms))
    limit = frame(telemetry).limit
    assert limit is not None and limit.by_pass[PARTS.index("prefetch")].tolist() == [0.25, 0.0, 0.5]


def test_what_is_kept_of_passes_is_bounded_whether_or_not_anybody_looks() -> None:
    telemetry, before = Telemetry(SHAPE), _alive()
    for index in range(2 * RING + 2 * FOLD):
        telemetry.add(step(index, "decode"))
    assert _alive() - before <= WINDOW + FOLD <= 1024
    assert frame(telemetry).columns["step"].tolist() == list(range(2 * RING + 2 * FOLD - 10, 2 * RING + 2 * FOLD))
    assert _alive() - before <= WINDOW


def test_a_pass_is_added_while_a_frame_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever counts holds the lock as long as that takes; the computing thread goes on, and nothing is lost."""
    telemetry, counting, go_on = Telemetry(SHAPE), threading.Event(), threading.Event()
    extend = Timelines.extend

    def slow(self: Timelines, steps: Sequence[StepRecord]) -> None:
        counting.set()
        assert go_on.wait(60)
        extend(self, steps)

    telemetry.add(step(0, "decode"))
    monkeypatch.setattr(Timelines, "extend", slow)
    frames = list[Frame]()
    looking = threading.Thread(target=lambda: frames.append(frame(telemetry)))
    looking.start()
    assert counting.wait(60)
    adding = threading.Thread(target=lambda: [telemetry.add(step(at, "decode")) for at in range(1, FOLD + 9)])
    adding.start()
    adding.join(60)
    waited = adding.is_alive()
    go_on.set()
    looking.join(60)
    adding.join(60)
    assert not waited, "a pass waited for a frame"
    assert frames and frame(telemetry, points=200).columns["step"].tolist() == list(range(FOLD + 9))


@pytest.mark.parametrize("looks_every", layered([1, 7, 100, RING + 100], quick=lambda every: every == 7))
def test_a_frame_shows_the_passes_themselves(looks_every: int) -> None:
    """Each column, over rings that fill up and begin anew, against loops over the records."""
    rng, shape = np.random.default_rng(0), ModelShape(layers=3, experts=8, top_k=2, hidden=4, expert_bytes=8)
    telemetry, steps = Telemetry(shape), list[StepRecord]()
    for index in range(2 * RING + 300):
        accepted = int(rng.integers(0, 4)) if index % 3 else 0
        layer = np.sort(rng.integers(0, 3, rng.integers(0, 9))).astype(np.int16)
        step = StepRecord(
            index=index,
            phase="decode" if index % 11 and not 600 < index < 700 else "prefill",
            tokens=1 + accepted,
            accepted=accepted,
            **{name: float(value) for name, value in zip(TIMES, rng.random(len(TIMES)), strict=True)},
            **{name: int(value) for name, value in zip(COUNTS, rng.integers(0, 1 << 40, len(COUNTS)), strict=True)},
            ids=rng.integers(0, 8, (3, 1 + accepted, 2)).astype(np.int16),
            layer=layer,
            expert=rng.integers(0, 8, layer.size).astype(np.int16),
            outcome=rng.integers(0, len(Outcome), layer.size).astype(np.uint8),
        )
        steps.append(step)
        telemetry.add(step)
        if index % looks_every == looks_every - 1 and index % 13 < 7:
            check(frame(telemetry, shape), steps[-10:], steps)
    check(frame(telemetry, shape, 240), steps[-240:], steps)


def check(found: Frame, tail: list[StepRecord], steps: list[StepRecord]) -> None:
    def column(name: str, dtype: type) -> list[Any]:
        return np.array([getattr(step, name) for step in tail], dtype).tolist()  # type: ignore[no-any-return]

    shown = {name: values.tolist() for name, values in found.columns.items()}
    wasted = np.array(column("wasted_bytes", np.float32), np.float32)
    left = (np.array(column("prefetch_bytes", np.float32), np.float32) - wasted).clip(0)
    assert (shown["step"], shown["prefetch_bytes"]) == (column("index", np.int32), left.tolist())
    assert shown["decode"] == [step.phase == "decode" for step in tail]
    for name in ("requests", "hits"):
        assert shown[name] == column(name, np.int32)
    for name in ("started_s", "total_ms", "stall_ms", "demand_bytes", "wasted_bytes", "disk_bytes"):
        assert shown[name] == column(name, np.float32)
    window, kept = steps[-WINDOW:], steps[-RING:]
    decode = [s for s in kept if s.phase == "decode"][-WINDOW:]
    written = len(decode) + sum(s.accepted for s in decode)
    assert (found.window, found.passes) == (written, len(window))
    hits, requests = sum(s.hits for s in decode), sum(s.requests for s in decode)
    moved, span_s = sum(s.demand_bytes + s.prefetch_bytes for s in window), sum(s.total_ms for s in window) / 1e3
    assert found.tpot_ms == pytest.approx(sum(s.total_ms for s in decode) / max(1, written))
    assert found.tpot_ms == pytest.approx(1e3 / found.tok_s if found.tok_s else 0), "guesses count in both"
    assert found.net_ms == pytest.approx(sum(s.net_ms for s in decode) / max(1, len(decode)))
    assert found.hit == pytest.approx(hits / requests if requests else np.nan, nan_ok=True)
    assert found.link_gbps == pytest.approx(moved / span_s / 1e9)
    assert found.link_peak_gbps == pytest.approx(max(rate(steps[: n + 1][-WINDOW:]) for n in range(len(steps))))
    names = ("used", "late", "wasted", "evicted")
    assert found.prefetched == tuple(sum(getattr(s, f"prefetch_{name}") for s in decode) for name in names)
    rates = []
    for layer in range(3):
        outcomes = np.concatenate([s.outcome[s.layer == layer] for s in decode] or [np.zeros(0)])
        rates.append((outcomes <= Outcome.PREFETCH_HIT).mean() if outcomes.size else np.nan)
    assert found.hit_rate.tolist() == pytest.approx(rates, nan_ok=True)


def rate(steps: list[StepRecord]) -> float:
    return sum(s.demand_bytes + s.prefetch_bytes for s in steps) / sum(s.total_ms for s in steps) / 1e6


def _alive() -> int:
    return sum(isinstance(one, StepRecord) for one in gc.get_objects())
