"""Traces out of the store: they are what the engine routed, one a model, and whole or not there."""

from __future__ import annotations

import errno
from pathlib import Path

import numpy as np
import pytest
from fastapi.testclient import TestClient

from app.server.api import build_app
from app.services.exports import traces
from app.services.exports.archive import ExportError, NothingThere
from app.services.host import Host
from app.services.progress import Answer
from core.errors import BusyError, MoestroError
from core.profile.trace import FileTrace, TraceWriter
from core.simulate import Config, simulate
from core.types import ModelShape, StepRecord
from tests.app.conftest import WAIT_S, GatedEngine, ended, follow, open_store, texts
from tests.fake_models import SHAPE


def asked(host: Host, chat: int | None = None) -> int:
    answer = ended(host.chats.ask(chat, "where does it go"))
    assert answer.chat_id is not None
    return answer.chat_id


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
    none = np.zeros(0, np.int16)
    return StepRecord(
        index,
        "decode" if tokens == 1 else "prefill",
        tokens,
        0.0,
        1.0,
        1.0,
        0.0,
        0.0,
        0.0,
        ids,
        none,
        none,
        none.astype(np.uint8),
    )


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


def test_a_crash_keeps_every_pass_that_was_computed(gated_host: Host, gated: type[GatedEngine], tmp_path: Path) -> None:
    answer = gated_host.chats.ask(None, "hello")
    gated.gate.release(5)

    def written(now: Answer) -> bool:
        return now.n_tokens == 5

    follow(answer, written)
    copy = tmp_path / "crashed"  # what is on disk while the answer is being written
    copy.mkdir()
    for file in tmp_path.glob("moestro.sqlite3*"):
        (copy / file.name).write_bytes(file.read_bytes())
    store = open_store(copy)
    (found,) = store.traces(answer.chat_id)
    assert [chunk.sizes.tolist()[1:] for chunk in found.chunks()] == [[1] * 5]


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
