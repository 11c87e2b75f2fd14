"""Exports against a brute-force count over the records, and those that fail: a full disk, nothing there."""

import errno
import io
import json
import time
import zipfile
from collections import Counter
from pathlib import Path
from typing import IO, Any

import numpy as np
import pandas as pd
import pytest

from app.services.exports import archive
from app.services.exports.tables import DEFINITIONS
from app.services.host import Host
from core.metrics.lossy_events import CHOICE, Action, Why
from core.types import Outcome, StepRecord, Transfer
from tests.app.conftest import WAIT_S, asked, ended, open_host
from tests.app.records import a_step
from tests.selection import layered


def read(path: Path) -> tuple[dict[str, pd.DataFrame], dict[str, Any]]:
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        tables = {name: pd.read_csv(io.BytesIO(archive.read(f"{name}.csv"))) for name in DEFINITIONS}
        return tables, json.loads(archive.read("manifest.json"))


def rows(table: pd.DataFrame) -> Any:
    return table.itertuples()


def outcomes(steps: list[StepRecord]) -> Counter[tuple[str, int, int, int]]:
    return Counter(
        (s.phase, int(layer), int(expert), int(outcome))
        for s in steps
        for layer, expert, outcome in zip(s.layer, s.expert, s.outcome, strict=True)
    )


def check_outcomes(row: Any, counted: Counter[int]) -> None:
    assert (row.requests, row.hits, row.prefetch_hits, row.late, row.misses, row.disk_misses) == (
        counted.total(),
        counted[Outcome.HIT] + counted[Outcome.PREFETCH_HIT],
        counted[Outcome.PREFETCH_HIT],
        counted[Outcome.PARTIAL_HIT],
        counted[Outcome.MISS],
        counted[Outcome.MISS_DISK],
    )
    if hasattr(row, "hit_rate") and row.requests:
        assert row.hit_rate == pytest.approx(row.hits / row.requests)


@pytest.fixture
def two_chats(host: Host, tmp_path: Path) -> tuple[Host, int, int]:
    """A chat of two answers with a setting moved between them, and another chat; half of the experts are on disk."""
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "moestro.json").touch()
    assert host.loader.load(host.loader.plan(str(tmp_path / "pack"))).join(WAIT_S)
    first = asked(host, None, "one two three")
    assert host.models.change("budget", "75%") == ""
    asked(host, first, "four")
    return host, first, asked(host, None, "other")


def check_transfers(told: pd.DataFrame, moved: list[Transfer]) -> None:
    assert told["demand_copies"].sum() == len(moved)
    assert told["prefetch_copies"].sum() == 0
    for row in rows(told):
        mine = [t for t in moved if (int(t.ended_s), t.phase, t.origin) == (row.second, row.phase, row.origin)]
        assert row.demand_bytes == sum(t.bytes for t in mine)
        assert row.gb_s == pytest.approx(row.demand_bytes / 1e9)
        assert row.copy_ms == pytest.approx(sum(t.ended_s - t.started_s for t in mine) * 1e3)


def test_every_table_of_a_chat_against_brute_force(two_chats: tuple[Host, int, int], tmp_path: Path) -> None:
    host, chat, _ = two_chats
    tables, _ = read(archive.write(host.store, tmp_path / "out" / "chat.zip", chat=chat))
    steps = list(host.store.steps.records(chat=chat))
    assert len(steps) == 26

    tokens = tables["tokens"]
    assert list(tokens["index"]) == [s.index for s in steps]
    assert set(tokens["chat"]) == {chat}
    assert tokens["answer"].nunique() == 2
    for row, step in zip(rows(tokens), steps, strict=True):
        assert (row.phase, row.tokens, row.slots, row.demand_bytes, row.disk_bytes) == (
            step.phase,
            step.tokens,
            step.slots,
            step.demand_bytes,
            step.disk_bytes,
        )
        assert row.start_s == pytest.approx(step.started_s)
        assert row.compute_ms + row.stall_ms + row.idle_ms == pytest.approx(row.total_ms)
        check_outcomes(row, Counter(step.outcome.tolist()))

    by_expert = outcomes(steps)
    layers, experts = tables["layers"], tables["experts"]
    assert len(layers) == 2 * 4
    assert len(experts) == 2 * 4 * 16
    for row in rows(layers):
        of_layer = Counter[int]()
        for (phase, layer, _, outcome), n in by_expert.items():
            of_layer[outcome] += n * ((phase, layer) == (row.phase, row.layer))
        check_outcomes(row, of_layer)
    routed, pairs = Counter[Any](), Counter[Any]()
    for step in steps:
        for layer, ids in enumerate(step.ids.tolist()):
            for chosen in ids:
                routed.update((step.phase, layer, e) for e in chosen)
                pairs.update((step.phase, layer, i, j) for i in chosen for j in chosen if i < j)
    for row in rows(experts):
        check_outcomes(row, Counter({o: by_expert[row.phase, row.layer, row.expert, o] for o in Outcome}))
        assert row.activations == routed[row.phase, row.layer, row.expert]
    assert {(r.phase, r.layer, r.expert_i, r.expert_j): r.tokens for r in rows(tables["coactivation"])} == dict(pairs)

    check_transfers(tables["transfers"], [t for s in steps for t in s.transfers])
    [change] = tables["settings"].to_dict("records")
    assert {n: change[n] for n in ("load", "chat", "index", "name", "old", "new")} == {
        "load": host.models.load_id,
        "chat": chat,
        "index": 13,
        "name": "budget",
        "old": "62%",
        "new": "75%",
    }


def test_lossy_choices_are_counted_with_their_reasons(host: Host, tmp_path: Path) -> None:
    assert host.models.change("miss", "drop") == ""
    chat = asked(host, None, "What is left out?")
    tables, _ = read(archive.write(host.store, tmp_path / "e.zip", chat=chat))
    with host.store.db.reader() as db:
        stored = db.execute("SELECT phase, changed, choices FROM steps WHERE chat = ?", (chat,)).fetchall()
    assert stored
    for _, changed, choices in stored:
        assert changed == int((np.frombuffer(choices, CHOICE)["action"] >= Action.SUBSTITUTE).sum())
    events = [(row["phase"], event) for row in stored for event in np.frombuffer(row["choices"], CHOICE)]
    counted = Counter(
        (phase, int(e["layer"]), Action(e["action"]).name.lower(), Why(e["why"]).name.lower()) for phase, e in events
    )
    assert {
        (r.phase, r.layer, r.action, r.why): r.count_
        for r in rows(tables["choices"].rename(columns={"count": "count_"}))
    } == counted
    assert tables["tokens"].changed.sum() == sum(row["changed"] for row in stored) > 0
    assert tables["tokens"].dropped.sum() > 0 == tables["tokens"].substituted.sum()


def test_a_load_holds_all_its_chats_and_a_chat_all_its_loads(two_chats: tuple[Host, int, int], tmp_path: Path) -> None:
    host, chat, other = two_chats
    first = host.models.load_id
    loading = host.loader.load(host.loader.plan("demo", format="int8"))
    assert loading.join(WAIT_S)
    asked(host, other, "after the reload")
    tables, _ = read(archive.write(host.store, tmp_path / "load.zip", load=first))
    assert set(tables["tokens"]["chat"]) == {chat, other}
    assert set(tables["tokens"]["load"]) == {first}
    tables, manifest = read(archive.write(host.store, tmp_path / "chat.zip", chat=other))
    assert tables["tokens"].groupby("load").size().to_dict() == {first: 13, host.models.load_id: 13}
    assert set(tables["layers"]["load"]) == {first, host.models.load_id}
    assert [one["format"] for one in manifest["loads"]] == ["checkpoint", "int8"]


def test_the_manifest_explains_every_column(two_chats: tuple[Host, int, int], tmp_path: Path) -> None:
    host, chat, _ = two_chats
    tables, manifest = read(archive.write(host.store, tmp_path / "chat.zip", chat=chat))
    for name, table in tables.items():
        assert list(table.columns) == list(manifest["definitions"][name])
        assert all(sentence.endswith(".") for sentence in manifest["definitions"][name].values())
    [load] = manifest["loads"]
    assert (load["model"], load["model_hash"], load["device"]) == (host.models.model_id, "fake", "cpu")
    assert load["format"] == "checkpoint"
    assert load["shape"]["experts"] == 16
    assert load["settings_at_load"]["budget"] == "62%"
    assert (manifest["exact"], manifest["link"]) == (True, "measured")
    assert manifest["versions"]["pandas"] == pd.__version__


def test_an_export_of_little(host: Host, tmp_path: Path) -> None:
    """Of nothing, which is told; without a single step, which has its columns; and of passes without telemetry, which
    count no requests."""
    for nothing in ({"chat": 99}, {"load": 99}):
        with pytest.raises(archive.NothingThere):
            archive.write(host.store, tmp_path / "x.zip", **nothing)
    assert not (tmp_path / "x.zip").exists() and not list(tmp_path.glob("*.part"))
    load = host.models.load_id
    assert load is not None
    tables, manifest = read(archive.write(host.store, tmp_path / "load.zip", load=load))
    assert {name: list(table.columns) for name, table in tables.items()} == {n: list(c) for n, c in DEFINITIONS.items()}
    assert all(table.empty for table in tables.values()) and manifest["link"] == "none"
    bare = a_step(7)
    bare.ids, bare.transfers = np.empty((0, 1, 2), np.int16), ()
    bare.layer = bare.expert = np.empty(0, np.int16)
    bare.outcome = np.empty(0, np.uint8)
    host.store.steps.add(load, None, None, bare, {})
    tables, manifest = read(archive.write(host.store, tmp_path / "load.zip", load=load))
    assert tables["tokens"]["requests"].tolist() == [0] and tables["tokens"]["hit_rate"].isna().all()
    assert manifest["exact"] is False


def test_an_answer_whose_passes_were_all_recorded_as_another_s_is_listed(host: Host, tmp_path: Path) -> None:
    """As one that is written beside another from its first pass to its last."""
    first, second = (ended(host.chats.ask(None, text)) for text in ("one", "two"))
    with host.store.db.tx() as db:
        db.execute("UPDATE steps SET chat = ?, answer = ?", (first.chat_id, first.message_id))
    tables, _ = read(archive.write(host.store, tmp_path / "load.zip", load=host.models.load_id))
    assert tables["answers"]["answer"].tolist() == [first.message_id, second.message_id]


def test_an_export_does_not_wait_for_an_answer_nor_hold_it_up(tmp_path: Path, gated: Any) -> None:
    host = open_host(tmp_path, gated)
    answer = host.chats.ask(None, "one")
    gated.gate.release(5)
    version = -1
    while answer.n_tokens < 5:
        version = answer.wait(version, WAIT_S)
    tables, _ = read(archive.write(host.store, tmp_path / "live.zip", chat=answer.chat_id))
    assert len(tables["tokens"]) == 6
    gated.gate.release(100)
    assert answer.join(WAIT_S)
    assert answer.error == ""


class FullDisk(io.FileIO):
    """A file on a disk that is full after 4096 bytes."""

    def write(self, data: Any) -> int:
        if self.tell() + len(data) > 4096:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(data)


def test_a_full_disk_or_no_folder_is_told_and_leaves_nothing(two_chats: tuple[Host, int, int], tmp_path: Path) -> None:
    host, chat, _ = two_chats
    path = tmp_path / "out" / "chat.zip"
    path.parent.mkdir()
    path.write_bytes(b"an older export")
    before = host.chats.messages(chat)

    def full(path: Path) -> IO[bytes]:
        return FullDisk(path, "xb")

    with pytest.raises(archive.ExportError, match="The disk is full") as told:
        archive.write(host.store, path, chat=chat, opener=full)
    assert "as they were" in str(told.value)
    assert [p.name for p in path.parent.iterdir()] == ["chat.zip"]
    assert path.read_bytes() == b"an older export"
    assert host.chats.messages(chat) == before
    archive.write(host.store, path, chat=chat)  # with room again
    assert len(read(path)[0]["tokens"]) == 26
    (tmp_path / "file").write_text("")
    with pytest.raises(archive.ExportError, match="could not be written"):
        archive.write(host.store, tmp_path / "file" / "chat.zip", chat=chat)


@pytest.mark.parametrize(
    ("year", "stamped"),
    layered(
        [(1970, 1980), (1979, 1980), (2026, 2026), (2107, 2107), (2150, 2107)],
        quick=lambda case: case[0] in (1979, 2150),
    ),
)
def test_a_clock_that_zip_cannot_say_is_no_obstacle(
    two_chats: tuple[Host, int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, year: int, stamped: int
) -> None:
    host, chat, _ = two_chats
    monkeypatch.setattr(time, "localtime", lambda *_: time.struct_time((year, 5, 4, 3, 2, 1, 0, 124, 0)))
    path = archive.write(host.store, tmp_path / "chat.zip", chat=chat)
    with zipfile.ZipFile(path) as made:
        assert {one.date_time[0] for one in made.infolist()} == {stamped}
        assert {one.compress_type for one in made.infolist()} == {zipfile.ZIP_DEFLATED}
        assert made.testzip() is None
