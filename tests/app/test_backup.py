"""Copies of the chats: when they are made, what they hold, and how one is put back."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from app.cli import main
from app.store import Store, StoreError
from app.store.backup import EVERY_ANSWERS, EVERY_S, Backups, move_aside, restore
from app.store.check import backups, find_damage
from core.errors import BusyError
from tests.app.conftest import open_store
from tests.app.stores import filled, said, spoil


def test_the_last_two_copies_are_kept_and_are_whole(tmp_path: Path) -> None:
    filled(tmp_path)
    store = open_store(tmp_path)
    first, second, third = (store.backups.make() for _ in range(3))
    assert sorted(backups(tmp_path)) == sorted([second, third])
    assert not first.exists()
    assert find_damage(third) == ""
    assert [p.name for p in (tmp_path / "backups").iterdir() if p not in (second, third)] == []


def test_a_copy_is_one_state_while_answers_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(tmp_path)
    store = open_store(tmp_path)
    monkeypatch.setattr("app.store.backup.PAGES", 1)
    go_on, calls = store.backups._go_on, 0

    def between(*status: int) -> None:
        nonlocal calls
        calls += 1
        assert calls < 500, "the copy follows what is written, and does not end"
        store.db.put(f"key {calls}", {"a": "x" * 5000})
        go_on(*status)

    monkeypatch.setattr(store.backups, "_go_on", between)
    copy = store.backups.make()
    assert calls > 5, "nothing was written meanwhile"
    with closing(sqlite3.connect(copy)) as db:
        assert db.execute("SELECT count(*) FROM memory").fetchone() == (0,)


def test_copies_are_made_daily_and_after_many_answers(tmp_path: Path) -> None:
    filled(tmp_path)
    store = open_store(tmp_path)
    made: list[int] = []
    copies = Backups(store.db)
    copies.make = lambda: made.append(1)  # type: ignore[method-assign,assignment,return-value]
    (row,) = store.db.rows("SELECT created FROM chats")
    for _ in range(EVERY_ANSWERS - 1):
        copies.answered(row["created"] + 60)
    assert made == []
    copies.answered(row["created"] + 60)
    copies.wait()
    assert made == [1]
    copies.answered(row["created"] + EVERY_S + 60)  # the first of another day
    copies.wait()
    assert made == [1, 1]


def test_a_damaged_database_is_not_copied_over_the_good_copies(tmp_path: Path) -> None:
    path = filled(tmp_path)
    store = open_store(tmp_path)
    good = store.backups.make()
    store.db.rows("PRAGMA wal_checkpoint(TRUNCATE)")
    spoil(path)
    with pytest.raises(StoreError, match="damaged"):
        store.backups.make()
    assert backups(tmp_path) == [good]


def test_there_is_no_copy_without_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(tmp_path)
    store = open_store(tmp_path)
    monkeypatch.setattr("app.store.backup.SPARE", 1 << 60)
    with pytest.raises(StoreError, match="no room"):
        store.backups.make()
    assert backups(tmp_path) == []


def test_commands_restore(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("MOESTRO_HOME", str(tmp_path))
    path = filled(tmp_path, "first ")
    assert main(["data", "--backup"]) == 0
    damage = spoil(path)
    assert main(["data", "--check"]) == 1
    assert "data --restore` brings back the copy of" in capsys.readouterr().out
    assert main(["data", "--restore"]) == 0
    assert "first" in said(tmp_path)
    (aside,) = tmp_path.glob("moestro-damaged-*.sqlite3")
    assert aside.read_bytes() == damage

    spoil(path)
    assert main(["data", "--move-aside"]) == 0
    assert not path.exists()
    assert said(tmp_path) == ""
    assert len(list(tmp_path.glob("moestro-damaged-*.sqlite3"))) == 2
    assert main(["data"]) == 0


def test_only_a_whole_copy_is_put_back(tmp_path: Path) -> None:
    path = filled(tmp_path)
    with pytest.raises(StoreError, match="no whole copy"):
        restore(tmp_path)
    store = Store(tmp_path)
    older, newer = store.backups.make(), store.backups.make()
    store.close()
    spoil(newer)
    assert restore(tmp_path)[0] == older
    spoil(older)
    before = path.read_bytes()
    with pytest.raises(StoreError, match="no whole copy"):
        restore(tmp_path)
    assert path.read_bytes() == before


def test_nothing_is_moved_under_a_running_moestro(tmp_path: Path) -> None:
    filled(tmp_path)
    open_store(tmp_path)
    for rescue in (move_aside, restore):
        with pytest.raises(BusyError, match="already running"):
            rescue(tmp_path)
