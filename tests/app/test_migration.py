"""The store grows by migrations: each whole or not at all, and what an older version wrote reads as it was."""

from __future__ import annotations

import json
import sqlite3
import struct
from dataclasses import asdict
from pathlib import Path

import pytest

from app.store import Store, StoreError
from app.store.schema import MIGRATIONS, migrate
from core.types import Transfer
from tests.app.records import SHAPE, a_step


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
    copy = struct.pack("<hhqBBddd", 1, 7, 2**33, 1, 1, 1.0, 1.25, 1.5)  # one on demand, in decode
    values = {
        "load": 1,
        "step": 0,
        "phase": "decode",
        "tokens": 1,
        "started_s": 1.5,
        "total_ms": 4.0,
        "compute_ms": 2.5,
        "stall_ms": 1.0,
        "idle_ms": 0.5,
        "copy_ms": 1.25,
        "prefetch_issued": 0,
        "prefetch_used": 0,
        "prefetch_late": 0,
        "prefetch_wasted": 0,
        "demand_bytes": 2**33,
        "prefetch_bytes": 0,
        "wasted_bytes": 0,
        "slots": 5,
        "device_bytes": 6,
        "budget_bytes": 7,
        "emulated": 0,
        "exact": 1,
        "layers": 2,
        "top_k": 2,
        "ids": b"\x01\x00" * 4,
        "layer": b"\x00\x00",
        "expert": b"\x01\x00",
        "outcome": b"\x03",
        "transfers": copy,
    }
    old.execute(f"INSERT INTO steps ({', '.join(values)}) VALUES ({', '.join('?' * len(values))})", [*values.values()])
    old.close()
    store = Store(tmp_path)
    [step] = store.steps.records(load=1)
    assert (step.demand_bytes, step.disk_bytes, step.disk_misses, step.requests) == (2**33, 0, 0, 1)
    assert step.transfers == (Transfer(1, 7, 2**33, True, 1.0, 1.25, 1.5, "decode", "host"),)
    store.steps.add(1, None, None, a_step(1), {})
    assert [s.disk_bytes for s in store.steps.records(load=1)] == [0, 4096]
    assert [
        (s.prefetch_evicted, s.late_bytes, s.evicted_bytes, s.predict_ms, s.net_ms) for s in store.steps.records(load=1)
    ] == [(0, 0, 0, 0.0, 0.0), (1, 7, 5, 0.25, -0.5)]
    store.close()
