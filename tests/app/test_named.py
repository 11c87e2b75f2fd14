"""What was recorded for the lab: kept pass by pass, in a chat's trace, and what the predictor lab replays."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from app.services.analysis import sources
from app.services.analysis.analyst import Analyst
from app.services.analysis.question import Question
from app.services.analysis.sources import RoutingSource
from app.services.exports import traces
from app.services.jobs import JobRunner
from app.store import Store, StoreError
from app.store.named import packed, unpacked
from core.metrics.record import Beside
from core.profile.trace import FileTrace
from core.profile.trace.chunk import BESIDE, beside_map_type
from core.types import StepRecord
from tests.app.records import SHAPE, a_step, load_of
from tests.app.test_analysis import over

GATE = ("gate", {"width": 0, "floor": 0.0, "distance": 1})
WIDER = ("gate", {"width": 3, "floor": 0.0, "distance": 1})
STRIDE = ("stride", {"width": 5})


def knowing(index: int, predictors: tuple[tuple[str, dict[str, float]], ...]) -> StepRecord:
    """A decoded token whose routing every one of the predictors knew a layer before."""
    step = a_step(index)
    step.ids = np.random.default_rng(index).permuted(np.tile(np.arange(8, dtype=np.int16), (2, 1)), axis=1)[:, None, :2]
    rows = [(by, 0, 0, 1, int(e), 0.9) for by in range(len(predictors)) for e in step.ids[1, 0]]
    step.beside = Beside(predictors, np.array(rows, BESIDE), np.empty(0, beside_map_type(8)))
    return step


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "home")


def recorded(store: Store) -> int:
    """A load of 12 tokens, of which 8 were recorded for the lab; the first 2 of these with another gate."""
    load = load_of(store)
    for index in range(12):
        step = knowing(index, (WIDER,) if index < 6 else (GATE, STRIDE)) if index >= 4 else a_step(index)
        store.steps.add(load, None, None, step, {})
    return load


def test_a_pass_is_unpacked_as_it_was_packed() -> None:
    maps = np.array([(1, 0, 1, 2, np.linspace(0, 1, 8))], beside_map_type(8))
    step = knowing(0, (GATE, STRIDE))
    whole = unpacked(packed(step.beside._replace(maps=maps)), 8)
    assert whole is not None and whole.predictors == (GATE, STRIDE)
    assert whole.ranked.tolist() == step.beside.ranked.tolist() and whole.maps["distribution"][0, 7] == 1.0
    assert unpacked(packed(None), 8) is None
    for damaged in (b"x", packed(step.beside)[:-9], packed(step.beside._replace(ranked=step.beside.ranked[:1]))[:20]):
        with pytest.raises((ValueError, TypeError, KeyError)):
            unpacked(damaged, 8)


def test_a_trace_has_the_predictors_that_were_asked_last(store: Store, tmp_path: Path) -> None:
    load = recorded(store)
    (stored,) = store.traces(None, load)
    trace = FileTrace(traces.write(stored, tmp_path / "t"))
    shown = ("gate", {"width": 0, "floor": 0.0})  # a distance of 1 is its own, as is none
    assert trace.beside == (shown, STRIDE) and trace.tokens == 12
    (chunk,) = trace.chunks()
    gate = chunk.beside[chunk.beside["by"] == 0]
    assert sorted(set(gate["of"].tolist())) == list(range(6, 12)), "of a gate with other parameters nothing is taken"
    assert gate["expert"].reshape(6, 2).tolist() == chunk.ids[6:, 1].tolist()
    with store.db.tx() as db:
        db.execute("UPDATE steps SET named = x'00' WHERE step = 11")
    (stored,) = store.traces(None, load)
    with pytest.raises(StoreError, match="damaged"):
        traces.write(stored, tmp_path / "t")
    store.close()


def test_the_lab_tests_all_of_them_on_the_passes_that_were_recorded(store: Store) -> None:
    load, analyst = recorded(store), Analyst(store, JobRunner(), processes=1)
    source = RoutingSource("load", load)
    asked = Question(source, predictors=("gate", "stride", "recent"), kind="lab", slots=8, shape=SHAPE)
    times = {"compute_ms": 5.0, "load_ms": 1.0, "expert_ms": 0.1, "miss_ms": 0.1}
    over(analyst.start(Question(**{name: getattr(asked, name) for name in asked.__slots__} | times)))
    runs = {run.predictor: run for run in analyst.lab.runs}
    assert runs["gate"].replayed and not runs["gate"].problem and runs["gate"].recall[1] == pytest.approx(6 / 8)
    assert "Only the 8 of 12 tokens recorded for the lab are used." in analyst.lab.about.notes
    assert analyst.lab.about.tokens == 8 and not runs["recent"].replayed
    assert "it has those of" in runs["stride"].problem, "its parameters are others than the recorded ones"
    whole = sources.from_store(store, source, store.folder / "x.trace")
    assert whole.tokens == 12 and not whole.notes
    assert not Question(source, predictors=("recent",)).needs_recording
    store.close()
