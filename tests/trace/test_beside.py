"""Traces that hold what several predictors named: read as written, replayed by one of them, refused where damaged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from core.errors import TraceError
from core.metrics.record import Beside
from core.profile.trace import FileTrace, TraceHead, TraceWriter
from core.profile.trace.chunk import BESIDE, beside_map_type
from core.profile.trace.file import save
from core.simulate import Config
from core.simulate.prefetchers import TimedConfig, predictor_for
from core.simulate.replayed import Replayed
from core.simulate.timed_replay import passes
from core.simulate.trace_view import TraceView
from tests.trace.passes import routed, step

GATE: Any = ("gate", {"width": 0, "floor": 0.0, "distance": 0})
MAPS: Any = ("expert_map", {"distance": 0, "capacity": 1000, "semantic": True, "dynamic": True, "learn": True})
SOME = TimedConfig(Config("lru", 8), "gate")


def written(path: Path, *, by: int = 0, expert: int = 4) -> FileTrace:
    """Three passes; in pass n the gate names expert n in layer 1 from layer 0, and the maps expert 8 at the start."""
    with TraceWriter(path, TraceHead(3, 9, 2, beside=[GATE, MAPS])) as writer:
        for number, ids in enumerate(routed(3)):
            one = step(ids[:, None])
            rows = [(by, 0, 0, 1, min(number, expert), 0.5), (1, 0, -1, 0, 8, 0.25)]
            found = [(1, 0, 1, 2, np.full(9, number / 9, np.float32))]
            one.beside = Beside((GATE, MAPS), np.array(rows, BESIDE), np.array(found, beside_map_type(9)))
            writer.add(one)
        strange = step(routed(1)[0][:, None])
        strange.beside = Beside((GATE,), np.array([(0, 0, 0, 1, 5, 0.5)], BESIDE), np.empty(0, beside_map_type(9)))
        writer.add(strange)  # of other predictors than the file's
    return FileTrace(path)


def told(trace: FileTrace, config: TimedConfig) -> list[list[tuple[int, int]]]:
    """What a replay names in each pass: (layer, expert)."""
    predictor, found = predictor_for(config, trace), []
    assert isinstance(predictor, Replayed)
    for _, chunk, at, tokens in passes(trace):
        predictor.follow(chunk, at)
        view = TraceView(trace, chunk, at, tokens, None)
        named = [*predictor.begin(view)]
        for layer in range(trace.layers):
            view.reach(layer)
            named += predictor.predict(view)
        found.append([(layer, expert) for layer, expert, _ in named])
    return found


def test_each_predictor_is_replayed_from_its_own_rows(tmp_path: Path) -> None:
    trace = written(tmp_path / "t")
    assert trace.beside == (GATE, MAPS) and trace.predictor is None
    copy = save(trace, tmp_path / "copy")
    for one in (trace, copy):
        assert told(one, SOME) == [[(1, 0)], [(1, 1)], [(1, 2)], []]
        assert told(one, TimedConfig(Config("lru", 8), "expert_map"))[:3] == [[(0, 8)]] * 3
    predictor = predictor_for(TimedConfig(Config("lru", 8), "expert_map"), trace)
    assert isinstance(predictor, Replayed)
    (chunk, *_) = trace.chunks()
    predictor.follow(chunk, 2)
    view = TraceView(trace, chunk, 2, slice(2, 3), None)
    view.reach(1)
    predictor.predict(view)
    [(layer, distribution)] = predictor.take_maps()
    assert layer == 2 and distribution == pytest.approx(np.full(9, 2 / 9))


def test_what_was_recorded_with_other_parameters_is_not_taken(tmp_path: Path) -> None:
    trace = written(tmp_path / "t")
    with pytest.raises(TraceError, match=r"it has those of gate with width=0.*Record for the lab"):
        predictor_for(TimedConfig(Config("lru", 8), "gate", {"width": 2}), trace)
    with pytest.raises(TraceError, match="it has those of gate, expert_map"):
        predictor_for(TimedConfig(Config("lru", 8), "stride"), trace)


@pytest.mark.parametrize("wrong", [{"by": 2}, {"expert": -1}])
def test_rows_of_predictors_or_experts_that_are_not_there_are_refused(tmp_path: Path, wrong: dict[str, int]) -> None:
    trace = written(tmp_path / "t", **wrong)
    with pytest.raises(TraceError, match="do not exist"):
        list(trace.chunks())


def test_a_head_that_lists_no_predictors_is_refused(tmp_path: Path) -> None:
    data = written(tmp_path / "t").path.read_bytes()
    for strange in (b'"beside": [null, ', b'"beside": [{"name": 3, "params": {}}, '):
        (tmp_path / "bad").write_bytes(data.replace(b'"beside": [', strange))
        with pytest.raises(TraceError, match="damaged"):
            FileTrace(tmp_path / "bad")
