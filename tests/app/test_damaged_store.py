"""A database that is not what it should be: told before anything is written, kept, and what can be done about it."""

import itertools
import os
import sqlite3
import threading
from contextlib import closing
from pathlib import Path

import pytest

from app.services.exports import archive
from app.store import DamagedError, Store, StoreError
from app.store import check as checking
from app.store.backup import move_aside
from app.store.check import NAME, Check, find_damage
from app.ui.tabs.messages import statistics
from tests.app.conftest import open_host, open_store
from tests.app.stores import changed, filled, said, spoil
from tests.logged import Logged
from tests.selection import layered

DEEP = "replace(hex(zeroblob(50000)), '0', '[')"  # JSON of 100,000 lists inside each other


@pytest.mark.parametrize("how", ["a page", "the header", "the end", "no database"])
def test_damage_is_told_before_anything_is_written(tmp_path: Path, how: str) -> None:
    path = filled(tmp_path)
    if how == "a page":
        spoil(path)
    elif how == "the header":
        path.write_bytes(b"SQLite format 4\0" + path.read_bytes()[16:])
    elif how == "the end":
        path.write_bytes(path.read_bytes()[: 5 * 4096])
    else:
        path.write_bytes(b"this is no database" * 1000)
    before = path.read_bytes()
    with pytest.raises(DamagedError, match=r"damaged.*data --move-aside") as caught:
        Store(tmp_path)
    assert str(path) in str(caught.value)
    assert path.read_bytes() == before
    move_aside(tmp_path)  # nothing holds the folder any more


@pytest.mark.parametrize("left", [0, 1, 99])
def test_a_file_cut_to_less_than_a_header_is_damaged_and_not_new(tmp_path: Path, left: int) -> None:
    path = filled(tmp_path)
    os.truncate(path, left)
    with pytest.raises(DamagedError, match=r"has been cut to .*data --move-aside"):
        Store(tmp_path)
    assert path.stat().st_size == left
    assert move_aside(tmp_path) is not None
    assert said(tmp_path) == ""  # a new one


@pytest.mark.parametrize("end", ["-wal", "-journal"])
def test_what_is_left_beside_a_lost_database_is_neither_used_nor_deleted(tmp_path: Path, end: str) -> None:
    path = filled(tmp_path)
    path.unlink()
    log = path.with_name(path.name + end)
    log.write_bytes(b"commits")
    with pytest.raises(DamagedError, match=f"it is gone, and its {NAME}{end}"):
        Store(tmp_path)
    aside = move_aside(tmp_path)
    assert aside is not None and aside.with_name(aside.name + end).read_bytes() == b"commits"
    assert said(tmp_path) == ""


def test_a_start_that_ended_too_early_leaves_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(self: Path, target: Path) -> Path:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            Store(tmp_path)
    assert not (tmp_path / NAME).exists()
    assert said(tmp_path) == ""


@pytest.mark.parametrize("name", [NAME, "in-use.sqlite3"])
def test_a_folder_in_the_place_of_a_file_is_told_without_the_systems_numbers(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(StoreError, match=name) as caught:
        Store(tmp_path)
    assert "Errno" not in str(caught.value) and "Move it away" in str(caught.value)


def test_a_damaged_in_use_file_is_not_taken_for_damaged_chats(tmp_path: Path) -> None:
    filled(tmp_path)
    (tmp_path / "in-use.sqlite3").write_bytes(b"no database" * 500)
    with pytest.raises(StoreError, match=r"in-use\.sqlite3 is damaged.*delete it") as caught:
        Store(tmp_path)
    assert not isinstance(caught.value, DamagedError)


@pytest.mark.parametrize(
    ("column", "value"),
    layered(
        itertools.product(("stats", "quality"), ("zeroblob(3)", "'null'", "'[]'", "'{}'", "'[1'", DEEP)),
        quick=lambda case: case[1] in ("zeroblob(3)", DEEP) or case == ("stats", "'[]'"),
    ),
)
def test_damaged_figures_of_a_message_are_left_out(tmp_path: Path, caplog: Logged, column: str, value: str) -> None:
    path = filled(tmp_path, "word ")
    changed(path, f"UPDATE messages SET {column} = {value} WHERE role = 'assistant'")
    store = open_store(tmp_path)
    for _ in range(2):
        answer = store.chats.messages(1)[-1]
        assert answer.text == "word " * 40 and getattr(answer, column) is None
        statistics(answer)
    assert caplog.text.count("are not shown") == 1
    with pytest.raises(StoreError, match=r"recorded there is damaged: .*words are kept"):
        archive.contents(store, 1, None)


@pytest.mark.parametrize(
    "change",
    [
        "model = zeroblob(3)",
        "ended = zeroblob(3)",
        "created = 1e308",
        f"settings = {DEEP}",
        "spec = 'null'",
        "manifest = '[]'",
        'shape = \'{"layers": "2"}\'',
    ],
)
def test_a_damaged_load_is_left_out(tmp_path: Path, caplog: Logged, change: str) -> None:
    path = filled(tmp_path)
    changed(path, f"UPDATE loads SET {change}")
    store = open_store(tmp_path)
    assert store.steps.loads() == [] and store.traces(1) == []
    assert "is left out" in caplog.text


@pytest.mark.parametrize(
    ("sql", "told"),
    [
        ("DROP TABLE pieces", "no table pieces"),
        ("ALTER TABLE messages DROP COLUMN error", "messages has no error"),
        ("ALTER TABLE steps RENAME COLUMN ids TO id5", "steps has no ids"),
        ("PRAGMA user_version = -7", "version -7"),
        ("PRAGMA user_version = 99", "newer Moestro.*version 99"),
    ],
)
def test_a_whole_database_with_other_tables_is_refused(tmp_path: Path, sql: str, told: str) -> None:
    path = filled(tmp_path)
    changed(path, sql)
    with pytest.raises(StoreError, match=told):
        Store(tmp_path)


def test_another_programs_database_is_left_alone(tmp_path: Path) -> None:
    changed(tmp_path / NAME, "CREATE TABLE bookmarks (url TEXT)")
    with pytest.raises(StoreError, match=r"another program's database.*bookmarks"):
        Store(tmp_path)
    with closing(sqlite3.connect(tmp_path / NAME)) as db:
        assert [row[0] for row in db.execute("SELECT name FROM sqlite_schema")] == ["bookmarks"]


def test_a_check_that_takes_too_long_goes_on_beside_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it then finds ends all writing; until then the store is used."""
    path, go, find = filled(tmp_path), threading.Event(), find_damage

    def slow(path: Path, stop: threading.Event | None = None) -> str:
        assert go.wait(60)
        return find(path, stop) or "row 3 missing from index"

    monkeypatch.setattr(checking, "find_damage", slow)
    monkeypatch.setattr(checking.Check.wait, "__defaults__", (0.01,))
    store = Store(tmp_path)
    store.db.put("a", {"b": 1})
    go.set()
    store.db._check._thread.join()
    with pytest.raises(DamagedError, match="row 3 missing"):
        store.db.put("a", {"b": 2})
    assert store.db.get("a") == {"b": 1}
    store.close()
    assert path.exists()


def test_a_check_ends_when_it_is_told_to(tmp_path: Path) -> None:
    path = filled(tmp_path)
    changed(
        path,
        "CREATE TABLE big (a INTEGER PRIMARY KEY, b)",
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 300000) "
        "INSERT INTO big SELECT i, i FROM n",
    )
    check = Check(path)
    check.stop()
    assert check.damage == ""


@pytest.mark.parametrize(
    "garbage",
    [
        "[1, 2",
        "[1]",
        '"x"',
        "null",
        '{"eviction": [1], "budget": {"a": 1}, "x": NaN}',
        '{"temperature": "hot", "seed": 1e99}',
        "[" * 3000,
        "7",
    ],
)
def test_garbage_among_what_is_remembered_is_forgotten(tmp_path: Path, garbage: str) -> None:
    Store(tmp_path).close()
    with closing(sqlite3.connect(tmp_path / NAME)) as db:
        for key in ("settings", "sampling", "spec", "folders", "recent", "import", "whatif", "lab", "evaluation"):
            db.execute("INSERT OR REPLACE INTO memory VALUES (?, ?)", (key, garbage))
        db.commit()
    host = open_host(tmp_path)
    host.loader.last_spec()
    host.library.entries()
    assert host.models.change("eviction", "fifo") == ""


def test_a_damaged_recording_is_told_and_the_rest_is_read(tmp_path: Path) -> None:
    path = filled(tmp_path)
    changed(
        path,
        "UPDATE steps SET ids = x'0102030405' WHERE id = 5",
        "INSERT INTO loads (model, created, spec, settings, shape, manifest) VALUES ('x', 1, '{', '', '', '')",
    )
    store = open_store(tmp_path)
    (chat,) = store.chats.all()
    with pytest.raises(StoreError, match="pass 5 is damaged"):
        list(store.steps.records(chat=chat.id))
    (trace,) = store.traces(chat.id)
    with pytest.raises(StoreError, match="pass 5 is damaged"):
        list(trace.chunks())
    assert len(store.steps.loads()) == 1
    with pytest.raises(StoreError):
        archive.contents(store, chat.id, None)
    store.steps.delete(chat.id)
    assert "one" in store.chats.messages(chat.id)[1].text
