"""The store: where it lives, what it keeps of chats and passes, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from app.store import Store, StoreError, data_dir
from app.store.row_checks import InvalidRow, shape_of
from core.errors import BusyError, MoestroError
from core.types import ModelShape, StepRecord
from tests.app.records import SHAPE, a_step, load_of

STATS = {
    "prompt_tokens": 3,
    "new_tokens": 2,
    "ttft_ms": 20.5,
    "tpot_ms": 9,
    "tok_s": 3.5,
    "hit_rate": None,
    "compute_ms": 1.0,
    "stall_ms": 0.0,
    "idle_ms": 0.5,
    "exact": True,
    "emulated": False,
    "reason": "stop",
}


@pytest.mark.parametrize(
    ("env", "platform", "expected"),
    [
        ({"MOESTRO_HOME": "/somewhere", "XDG_DATA_HOME": "/x"}, "linux", Path("/somewhere")),
        ({"XDG_DATA_HOME": "/x"}, "linux", Path("/x/moestro")),
        ({}, "linux", Path.home() / ".local" / "share" / "moestro"),
        ({"LOCALAPPDATA": "/local"}, "win32", Path("/local/moestro")),
        ({}, "win32", Path.home() / "AppData" / "Local" / "moestro"),
        ({"XDG_DATA_HOME": "/x"}, "darwin", Path.home() / "Library" / "Application Support" / "moestro"),
    ],
)
def test_the_data_directory_of_each_system(env: dict[str, str], platform: str, expected: Path) -> None:
    assert data_dir(env, platform) == expected


def test_a_record_reads_back_as_it_was(tmp_path: Path) -> None:
    store = Store(tmp_path)
    load = load_of(store)
    made = [a_step(0, tokens=3), a_step(1)]
    for step in made:
        store.steps.add(load, None, None, step, {})
    for one, other in zip(store.steps.records(load=load), made, strict=True):
        for name in StepRecord.__slots__:
            a, b = getattr(one, name), getattr(other, name)
            assert (a.dtype == b.dtype and a.tolist() == b.tolist()) if isinstance(b, np.ndarray) else a == b, name
    store.close()


def test_one_process_at_a_time(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with pytest.raises(BusyError, match="Another Moestro"):
        Store(tmp_path)
    load_of(store)  # the first is not disturbed
    store.close()
    store.close()
    Store(tmp_path).close()


def test_a_closed_store_says_so(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.close()
    with pytest.raises(StoreError):
        load_of(store)
    with pytest.raises(StoreError):
        store.chats.all()


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(StoreError, match="nothing can be written there"):
        Store(tmp_path / "file")


def test_a_damaged_file_is_told_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "moestro.sqlite3").write_bytes(b"this is no database" * 100)
    with pytest.raises(StoreError, match="damaged"):
        Store(tmp_path)
    assert (tmp_path / "moestro.sqlite3").read_bytes() == b"this is no database" * 100


def test_chats_are_listed_renamed_and_deleted_with_their_figures(tmp_path: Path) -> None:
    store = Store(tmp_path)
    load = load_of(store)
    first, answer = store.chats.begin(None, "How  do\ncaches work? " + "x" * 99, "demo")
    store.token(load, first, answer, 0, "one ", a_step(0, tokens=3), {})
    store.token(load, first, answer, 1, "two ", a_step(1), {"budget": "50%"})
    store.chats.finish(answer, "done", STATS)
    second, other = store.chats.begin(None, "second", "demo")
    store.token(load, second, other, 0, "one ", a_step(2), {})
    store.chats.finish(other, "done")
    newest, oldest = store.chats.all()
    assert (newest.title, newest.messages, newest.tokens) == ("second", 2, 1)
    assert oldest.title.startswith("How do caches work? xxx")
    assert len(oldest.title) == 60
    assert store.chats.messages(first)[1].stats == STATS
    store.chats.rename(first, " Caches ")
    assert store.chats.all()[1].title == "Caches"
    with pytest.raises(MoestroError, match="needs a name"):
        store.chats.rename(first, "  ")
    store.chats.delete(first)
    assert [c.id for c in store.chats.all()] == [second]
    assert [s.index for s in store.steps.records(load=load)] == [2]
    assert store.db.rows("SELECT 1 FROM messages WHERE chat = ?", first) == []
    third, _ = store.chats.begin(None, "third", "demo")
    assert third not in (first, second), "the number of a deleted chat was given to another"
    store.close()


def test_undo_puts_the_chat_back(tmp_path: Path) -> None:
    store = Store(tmp_path)
    chat, answer = store.chats.begin(None, "one", "demo")
    store.chats.finish(answer, "done")
    before = store.chats.messages(chat)
    for text, since in (("two", None), (None, before[1].id), ("uno", before[0].id)):
        _, answer = store.chats.begin(chat, text, "demo", since)
        assert store.chats.messages(chat) != before
        store.chats.undo(answer)
        assert store.chats.messages(chat) == before
    store.close()


def test_the_routing_of_the_latest_answers_is_remembered_for_the_forecast(tmp_path: Path) -> None:
    store = Store(tmp_path)
    assert store.steps.trace("demo", 10) is None
    load = load_of(store)
    store.steps.add(load, None, None, a_step(0, tokens=3), {})
    assert store.steps.trace("demo", 10) is None, "a prompt is no trace of decoding"
    for index in (1, 2, 3):
        step = a_step(index)
        step.ids = step.ids + np.int16(index)
        store.steps.add(load, None, None, step, {})
    load_of(store)  # a later load that has said nothing yet
    trace = store.steps.trace("demo", 2)
    assert trace is not None
    assert trace.shape == (2, SHAPE.layers, SHAPE.top_k)
    assert trace[:, 0, 0].tolist() == [2, 3], "not the latest ones, oldest first"
    assert store.steps.trace("other", 2) is None
    store.close()


def test_a_shape_of_an_older_version_is_read() -> None:
    """It was stored before text-to-text models had layers of an encoder."""
    stored = {"layers": 6, "experts": 32, "top_k": 4, "hidden": 192, "expert_bytes": 1000}
    assert shape_of(json.dumps(stored)) == ModelShape(**stored)
    with pytest.raises(InvalidRow):
        shape_of(json.dumps({**stored, "more": 1}))
