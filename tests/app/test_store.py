"""The store: where it lies, who may read it, what it keeps of chats and passes at what cost, and its migrations."""

import json
import os
import sqlite3
import stat
import struct
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from app.store import Store, StoreError, data_dir
from app.store.check import NAME
from app.store.row_checks import InvalidRow, shape_of
from app.store.schema import MIGRATIONS, migrate
from core.errors import BusyError, MoestroError
from core.types import ModelShape, StepRecord, Transfer
from tests.app.conftest import open_store
from tests.app.records import SHAPE, STATS, a_step, load_of
from tests.app.stores import filled


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


def test_a_record_reads_back_as_it_was(store: Store) -> None:
    load = load_of(store)
    made = [a_step(0, tokens=3), a_step(1)]
    for step in made:
        store.steps.add(load, None, None, step, {})
    for one, other in zip(store.steps.records(load=load), made, strict=True):
        for name in StepRecord.__slots__:
            a, b = getattr(one, name), getattr(other, name)
            assert (a.dtype == b.dtype and a.tolist() == b.tolist()) if isinstance(b, np.ndarray) else a == b, name


def test_one_process_at_a_time(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with pytest.raises(BusyError, match="Another Moestro"):
        Store(tmp_path)
    load_of(store)  # the first is not disturbed
    store.close()
    store.close()
    Store(tmp_path).close()
    for closed in (lambda: load_of(store), store.chats.all):
        with pytest.raises(StoreError):
            closed()


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(StoreError, match="nothing can be written there"):
        Store(tmp_path / "file")


@pytest.mark.parametrize(
    ("text", "title"),
    [
        (
            "File a.py:\n```\nimport os\n```\n\nWhat is  this?\n\nFile b c.md:\n````\n```\n````",
            "What is this? a.py b c.md",
        ),
        ("File a.py:\n```\nimport os\n```", "a.py"),
        ("File a.py:\n```\nnever closed", "File a.py: ``` never closed"),
        ("  ", "New chat"),
    ],
)
def test_a_chat_is_titled_by_its_question_and_files(store: Store, text: str, title: str) -> None:
    store.chats.begin(None, text, "demo")
    assert store.chats.all()[0].title == title


def test_chats_are_listed_renamed_and_deleted_with_their_figures(store: Store) -> None:
    load = load_of(store)
    first, answer = store.chats.begin(None, "How  do\ncaches work? " + "x" * 99, "demo")
    store.token(load, first, answer, 0, "one ", a_step(0, tokens=3), {})
    store.token(load, first, answer, 1, "two ", a_step(1), {"budget": "50%"})
    store.chats.finish(answer, "done", STATS)
    second, other = store.chats.begin(None, "second", "demo")
    store.token(load, second, other, 0, "one ", a_step(2), {})
    store.chats.finish(other, "done")
    newest, oldest = store.chats.all()
    assert (newest.title, newest.messages, newest.tokens) == ("second", 2, 1), "it has no figures"
    assert (oldest.messages, oldest.tokens) == (2, STATS["new_tokens"]), "as the line under the answer says"
    assert oldest.title.startswith("How do caches work? xxx")
    assert len(oldest.title) == 60
    assert store.chats.messages(first)[1].stats == STATS
    store.chats.rename(first, " Caches ")
    assert store.chats.all()[1].title == "Caches"
    with pytest.raises(MoestroError, match="needs a name"):
        store.chats.rename(first, "  ")
    version = store.chats.version
    store.chats.pin(second)
    store.chats.pin(first)
    assert store.chats.pinned == [second, first] and store.chats.version == version + 2
    store.chats.pin(second)
    store.chats.delete(first)
    assert store.chats.pinned == [], "the one unpinned, the other gone"
    assert [c.id for c in store.chats.all()] == [second]
    assert [s.index for s in store.steps.records(load=load)] == [2]
    assert store.db.rows("SELECT 1 FROM messages WHERE chat = ?", first) == []
    third, _ = store.chats.begin(None, "third", "demo")
    assert third not in (first, second), "the number of a deleted chat was given to another"


def test_the_routing_of_the_latest_answers_is_remembered_for_the_forecast(store: Store) -> None:
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
    assert trace.shape == (2, SHAPE.layers, SHAPE.top_k)
    assert trace[:, 0, 0].tolist() == [2, 3], "not the latest ones, oldest first"
    assert store.steps.trace("other", 2) is None


def test_a_shape_of_an_older_version_is_read() -> None:
    stored = {"layers": 6, "experts": 32, "top_k": 4, "hidden": 192, "expert_bytes": 1000}
    assert shape_of(json.dumps(stored)) == ModelShape(**stored)
    with pytest.raises(InvalidRow):
        shape_of(json.dumps({**stored, "more": 1}))


def test_the_cost_of_a_token_does_not_grow_with_the_answer(store: Store) -> None:
    load = load_of(store)
    chat, answer = store.chats.begin(None, "hello", "demo")
    before = store.db.rows("SELECT total(length(text)) FROM pieces")[0][0]
    for seq in range(50):
        store.token(load, chat, answer, seq, "word ", a_step(seq), {})
    rows = store.db.rows("SELECT length(text) FROM pieces")
    assert before == 0
    assert [row[0] for row in rows] == [5] * 50, "an earlier token was written again"
    assert store.db.rows("SELECT length(text) FROM messages WHERE id = ?", answer)[0][0] == 0


def test_a_migration_is_whole_or_not_at_all_and_keeps_the_data(tmp_path: Path) -> None:
    store = Store(tmp_path)
    chat, _ = store.chats.begin(None, "hello", "demo")
    store.close()
    db = sqlite3.connect(tmp_path / "moestro.sqlite3", isolation_level=None)
    with pytest.raises(sqlite3.OperationalError):
        migrate(db, (*MIGRATIONS, "ALTER TABLE chats ADD COLUMN colour TEXT; INSERT INTO nowhere VALUES (1)"))
    assert db.execute("PRAGMA user_version").fetchone()[0] == len(MIGRATIONS)
    migrate(db, (*MIGRATIONS, "ALTER TABLE chats ADD COLUMN colour TEXT"))
    assert db.execute("SELECT title, colour FROM chats WHERE id = ?", (chat,)).fetchone() == ("hello", None)
    db.close()
    with pytest.raises(StoreError, match="newer Moestro"):  # this program meets what a later one left
        Store(tmp_path)


def test_a_store_from_before_the_disk_tier_opens_and_reads_as_it_was(tmp_path: Path) -> None:
    old = sqlite3.connect(tmp_path / "moestro.sqlite3", isolation_level=None)
    migrate(old, MIGRATIONS[:1])
    old.execute(
        "INSERT INTO loads (model, created, spec, settings, shape, manifest) VALUES ('demo', 1.0, ?, '{}', ?, '{}')",
        ('{"model": "demo", "format": "int4", "group_size": 64}', json.dumps(asdict(SHAPE))),
    )
    nothing = "prefetch_issued prefetch_used prefetch_late prefetch_wasted prefetch_bytes wasted_bytes emulated".split()
    values = dict.fromkeys(nothing, 0) | {"load": 1, "step": 0, "phase": "decode", "tokens": 1, "started_s": 1.5}
    values |= {"total_ms": 4.0, "compute_ms": 2.5, "stall_ms": 1.0, "idle_ms": 0.5, "copy_ms": 1.25}
    values |= {"demand_bytes": 2**33, "slots": 5, "device_bytes": 6, "budget_bytes": 7, "exact": 1, "layers": 2}
    values |= {"top_k": 2, "ids": b"\x01\x00" * 4, "layer": b"\x00\x00", "expert": b"\x01\x00", "outcome": b"\x03"}
    values["transfers"] = struct.pack("<hhqBBddd", 1, 7, 2**33, 1, 1, 1.0, 1.25, 1.5)  # one on demand, in decode
    old.execute(f"INSERT INTO steps ({', '.join(values)}) VALUES ({', '.join('?' * len(values))})", [*values.values()])
    old.close()
    store = open_store(tmp_path)
    [step] = store.steps.records(load=1)
    assert (step.demand_bytes, step.disk_bytes, step.disk_misses, step.requests) == (2**33, 0, 0, 1)
    assert step.transfers == (Transfer(1, 7, 2**33, True, 1.0, 1.25, 1.5, "decode", "host"),)
    store.steps.add(1, None, None, a_step(1), {})
    assert [s.disk_bytes for s in store.steps.records(load=1)] == [0, 4096]
    assert [
        (s.prefetch_evicted, s.late_bytes, s.evicted_bytes, s.predict_ms, s.net_ms) for s in store.steps.records(load=1)
    ] == [(0, 0, 0, 0.0, 0.0), (1, 7, 5, 0.25, -0.5)]


def _modes(folder: Path) -> dict[str, int]:
    return {str(p.relative_to(folder)): stat.S_IMODE(p.stat().st_mode) for p in [folder, *folder.rglob("*")]}


@pytest.mark.skipif(os.name == "nt", reason="Windows has access lists, not modes")
def test_files_are_their_users_alone_also_old_ones(tmp_path: Path) -> None:
    home = tmp_path / "data"
    before = os.umask(0)
    try:
        filled(home)
        (home / "exports").mkdir()
        (home / "exports" / "old.zip").write_bytes(b"x")
        (home / "packs" / "mine").mkdir(parents=True)
        (home / "packs" / "mine" / "experts.bin").write_bytes(b"x")
        (home / "mine.txt").write_text("not Moestro's")
        for name in (".", NAME):
            (home / name).chmod(0o777)
        store = Store(home)
        store.backups.make()
        store.chats.begin(None, "hello", "demo")
        modes = _modes(home)
        store.close()
    finally:
        os.umask(before)
    assert modes.pop("mine.txt") == 0o666
    assert modes.pop("packs/mine") == 0o777
    assert modes.pop("packs/mine/experts.bin") == 0o666
    assert {f"{NAME}-wal", f"{NAME}-shm"} <= set(modes)
    assert {name: oct(mode) for name, mode in modes.items() if mode & 0o077} == {}
