"""Traces out of the store: what the engine routed and what the lab recorded beside it; whole, or not there."""

import errno
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from fastapi.testclient import TestClient

from app.server.api import build_app
from app.services.analysis import sources
from app.services.analysis.analyst import Analyst
from app.services.analysis.question import Question
from app.services.analysis.sources import RoutingSource
from app.services.exports import traces
from app.services.exports.archive import ExportError, NothingThere
from app.services.host import Host
from app.services.jobs import JobRunner
from app.store import Store, StoreError
from app.store.named import packed, unpacked
from core.errors import BusyError, MoestroError
from core.metrics.record import ShadowPredictions
from core.profile.trace import FileTrace, TraceWriter
from core.profile.trace.chunk import BESIDE, beside_map_type
from core.simulate import Config, simulate
from core.types import ModelShape, StepRecord
from tests.app import records
from tests.app.conftest import WAIT_S, GatedEngine, asked, ended, open_store, texts
from tests.fake_models import SHAPE


def test_a_chat_is_a_trace_of_what_the_engine_routed(host: Host, tmp_path: Path) -> None:
    chat = asked(host)
    asked(host)  # of another chat
    asked(host, chat)
    (found,) = host.store.traces(chat)
    steps = list(host.store.steps.records(chat=chat))
    assert (found.layers, found.experts, found.top_k) == (SHAPE.layers, SHAPE.experts, SHAPE.top_k)
    assert (found.model, found.model_hash) == ("demo", "fake")
    assert found.tokens == sum(step.tokens for step in steps)
    assert found.size == found.tokens * SHAPE.layers * SHAPE.top_k  # a byte an id
    file = FileTrace(traces.write(found, tmp_path / "out" / "chat.trace"))
    assert (file.model, file.model_hash, file.tokens) == ("demo", "fake", found.tokens)
    (chunk,) = file.chunks()
    assert chunk.ids.tolist() == np.concatenate([s.ids for s in steps], 1).transpose(1, 0, 2).tolist()
    assert chunk.sizes.tolist() == [s.tokens for s in steps]
    assert chunk.decode.tolist() == [s.phase == "decode" for s in steps]
    assert chunk.rid.tolist() == [0] * 13 + [1] * 13
    config = Config("lru", SHAPE.total // 2)
    assert simulate(file, [config], processes=1) == simulate(found, [config], processes=1)
    (everything,) = host.store.traces(None, host.models.load_id)
    assert everything.tokens == sum(s.tokens for s in host.store.steps.records(load=host.models.load_id))


def a_step(shape: ModelShape, index: int, tokens: int) -> StepRecord:
    ids = np.random.default_rng(index).integers(0, shape.experts, (shape.layers, tokens, shape.top_k), np.int16)
    return replace(records.a_step(index, tokens), ids=ids)


def test_a_chat_with_two_models_has_two_traces_and_long_ones_come_in_pieces(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    small, large = ModelShape(2, 8, 2, 4, 100), ModelShape(3, 300, 2, 4, 100)
    loads = [
        store.steps.add_load(name, {}, {}, shape, {"model_hash": name})
        for name, shape in (("a", small), ("b", large), ("a", small))
    ]
    chat, answer = store.chats.begin(None, "hello", "a")
    plan = [(loads[0], small, 1), (loads[1], large, 5000), (loads[1], large, 1), (loads[2], small, 3)]
    made = [a_step(shape, index, tokens) for index, (_, shape, tokens) in enumerate(plan)]
    for step, (load, _, _) in zip(made, plan, strict=True):
        store.steps.add(load, chat, answer, step, {})
    first, second = store.traces(chat)
    assert (first.model, first.loads, first.tokens) == ("a", (loads[0], loads[2]), 4)
    assert (second.model, second.tokens, second.size) == ("b", 5001, 5001 * 3 * 2 * 2)
    assert [len(chunk.ids) for chunk in second.chunks()] == [5000, 1]
    assert (
        np.concatenate([c.ids for c in second.chunks()]).transpose(1, 0, 2).tolist()
        == np.concatenate([made[1].ids, made[2].ids], 1).tolist()
    )
    assert traces.find(store, chat, None) == second
    assert traces.find(store, chat, loads[0]) == first
    for wrong in ((chat + 1, None), (chat, 99), (None, 99), (None, None)):
        with pytest.raises(NothingThere, match="Telemetry"):
            traces.find(store, *wrong)


def test_the_recording_is_deleted_apart_from_the_words(gated_host: Host, gated: type[GatedEngine]) -> None:
    gated.gate.release(100)
    chat = asked(gated_host)
    while gated.gate.acquire(blocking=False):
        pass
    before = texts(gated_host, chat)
    running = gated_host.chats.ask(chat, "more")
    with pytest.raises(BusyError, match="Stop the answer"):
        gated_host.chats.delete_recording(chat)
    gated_host.chats.stop(chat)
    assert running.join(WAIT_S)
    gated_host.chats.delete_recording(chat)
    assert gated_host.store.traces(chat) == []
    assert texts(gated_host, chat)[: len(before)] == before
    with pytest.raises(MoestroError, match="no longer exists"):
        gated_host.chats.delete_recording(chat + 1)


def test_a_full_disk_is_told_and_leaves_no_half(host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(TraceWriter):
        def flush(self) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    (found,) = host.store.traces(asked(host))
    path = traces.write(found, tmp_path / "out" / "chat.trace")
    before = path.read_bytes()
    monkeypatch.setattr(traces, "TraceWriter", Full)
    with pytest.raises(ExportError, match="The disk is full"):
        traces.write(found, path)
    assert [file.name for file in path.parent.iterdir()] == ["chat.trace"]
    assert path.read_bytes() == before
    (tmp_path / "file").write_text("")
    with pytest.raises(ExportError, match="could not be written"):
        traces.write(found, tmp_path / "file" / "chat.trace")


@pytest.mark.parametrize("change", ["UPDATE steps SET ids = x'00'", "UPDATE loads SET model = x'00ff'"])
def test_routing_that_was_damaged_is_told_and_leaves_no_half(host: Host, tmp_path: Path, change: str) -> None:
    chat = asked(host)
    with host.store.db.tx() as db:
        db.execute(change)
    with pytest.raises(MoestroError, match="damaged"):
        traces.write(traces.find(host.store, chat, None), tmp_path / "chat.trace")
    assert list(tmp_path.glob("*.trace*")) == []


def test_traces_are_links(host: Host, tmp_path: Path) -> None:
    with TestClient(build_app(host), base_url="http://127.0.0.1:7860") as client:
        assert client.get("/export/session.trace").status_code == 404
        chat = asked(host)
        for name in (
            f"/export/{chat}.trace",
            f"/export/{chat}.trace?load={host.models.load_id}",
            "/export/session.trace",
        ):
            reply = client.get(name)
            assert reply.headers["content-disposition"].endswith('.trace"')
            (tmp_path / "got.trace").write_bytes(reply.content)
            assert FileTrace(tmp_path / "got.trace").tokens == host.store.traces(chat)[0].tokens
        reply = client.get("/export/999.trace")
        assert reply.status_code == 404
        assert "No routing" in reply.text
        assert list((host.store.folder / "exports").iterdir()) == []


GATE = ("gate", {"width": 0, "floor": 0.0, "distance": 1})
WIDER = ("gate", {"width": 3, "floor": 0.0, "distance": 1})
STRIDE = ("stride", {"width": 5})


def knowing(index: int, predictors: tuple[tuple[str, dict[str, float]], ...]) -> StepRecord:
    """A decoded token whose routing every one of the predictors knew a layer before."""
    step = records.a_step(index)
    step.ids = np.random.default_rng(index).permuted(np.tile(np.arange(8, dtype=np.int16), (2, 1)), axis=1)[:, None, :2]
    rows = [(by, 0, 0, 1, int(e), 0.9) for by in range(len(predictors)) for e in step.ids[1, 0]]
    step.beside = ShadowPredictions(predictors, np.array(rows, BESIDE), np.empty(0, beside_map_type(8)))
    return step


def recorded(store: Store) -> int:
    """A load of 12 tokens, of which 8 were recorded for the lab; the first 2 of these with another gate."""
    load = records.load_of(store)
    for index in range(12):
        step = knowing(index, (WIDER,) if index < 6 else (GATE, STRIDE)) if index >= 4 else records.a_step(index)
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


def test_the_lab_tests_all_of_them_on_the_passes_that_were_recorded(store: Store) -> None:
    load, analyst = recorded(store), Analyst(store, JobRunner(), processes=1)
    source = RoutingSource("load", load)
    asked = Question(source, predictors=("gate", "stride", "recent"), kind="lab", slots=8, shape=records.SHAPE)
    times = {"compute_ms": 5.0, "load_ms": 1.0, "expert_ms": 0.1, "miss_ms": 0.1}
    ended(analyst.start(Question(**{name: getattr(asked, name) for name in asked.__slots__} | times)))
    runs = {run.predictor: run for run in analyst.lab.runs}
    assert runs["gate"].replayed and not runs["gate"].problem and runs["gate"].recall[1] == pytest.approx(6 / 8)
    assert "Only the 8 of 12 tokens recorded for the lab are used." in analyst.lab.about.notes
    assert analyst.lab.about.tokens == 8 and not runs["recent"].replayed
    assert "it has those of" in runs["stride"].problem, "its parameters are others than the recorded ones"
    whole = sources.from_store(store, source, store.folder / "x.trace")
    assert whole.tokens == 12 and not whole.notes
    assert not Question(source, predictors=("recent",)).needs_recording
