"""The store: where it lives, what a crash costs, that a commit is whole, and that it can grow."""

from __future__ import annotations

import json
import re
import sqlite3
import struct
import subprocess
import sys
import textwrap
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from app.store import Store, StoreError, data_dir
from app.store.schema import MIGRATIONS, migrate
from core.errors import BusyError, MoestroError
from core.types import ModelShape, StepRecord, Transfer

ROOT = Path(__file__).resolve().parents[2]
SHAPE = ModelShape(layers=2, experts=8, top_k=2, hidden=4, expert_bytes=100)


def a_step(index: int = 0, tokens: int = 1) -> StepRecord:
    ids = np.arange(2 * tokens * 2).reshape(2, tokens, 2).astype(np.int16) % 8
    return StepRecord(  # a hit, a miss from host memory, one from disk, and one whose copy was late
        index=index,
        phase="decode" if tokens == 1 else "prefill",
        tokens=tokens,
        started_s=1.5,
        total_ms=4.0,
        compute_ms=2.5,
        stall_ms=1.0,
        idle_ms=0.5,
        copy_ms=1.25,
        ids=ids,
        layer=np.array([0, 0, 1, 1], np.int16),
        expert=np.array([1, 2, 3, 7], np.int16),
        outcome=np.array([0, 3, 4, 2], np.uint8),
        slots=5,
        exact=False,
        disk_bytes=4096,
        prefetch_evicted=1,
        late_bytes=7,
        evicted_bytes=5,
        predict_ms=0.25,
        net_ms=-0.5,
        transfers=(
            Transfer(1, 7, 2**33, True, 1.0, 1.25, 1.5, "decode"),
            Transfer(0, 2, 5, False, 1.0, 1.0, 2.0, "prefill"),
            Transfer(1, 3, 5, True, 1.0, 1.5, 2.0, "decode", "disk"),
            Transfer(1, 4, 5, False, 1.0, 1.75, 2.0, "decode", "disk"),
        ),
    )


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


def load_of(store: Store) -> int:
    return store.steps.add_load("demo", {"model": "demo"}, {"budget": "50%"}, SHAPE, {"device": "cpu"})


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


def test_a_token_is_committed_whole_or_not_at_all(tmp_path: Path) -> None:
    store = Store(tmp_path)
    load = load_of(store)
    chat, answer = store.chats.begin(None, "hello", "demo")
    store.token(load, chat, answer, 0, "one ", a_step(0), {})
    with pytest.raises(StoreError, match="could not save"):
        store.token(999, chat, answer, 1, "two ", a_step(1), {})  # no such load: the second of its two rows fails
    assert store.chats.messages(chat)[1].text == "one "
    store.token(load, chat, answer, 1, "two ", a_step(1), {})
    assert store.chats.messages(chat)[1].text == "one two "
    store.close()


def test_a_full_disk_is_told_and_the_store_goes_on(tmp_path: Path) -> None:
    store = Store(tmp_path)
    load = load_of(store)
    chat, answer = store.chats.begin(None, "hello", "demo")
    pages = store.db.rows("PRAGMA page_count")[0][0]
    store.db.rows(f"PRAGMA max_page_count = {pages + 2}")  # SQLite then fails as it does on a full disk

    words = 0

    def fill() -> None:
        nonlocal words
        for words in range(1000):
            store.token(load, chat, answer, words, "word " * 100, a_step(words), {})

    with pytest.raises(StoreError, match="The disk is full"):
        fill()
    store.db.rows("PRAGMA max_page_count = 1000000")
    assert store.chats.messages(chat)[1].text == "word " * 100 * words
    assert words >= len(list(store.steps.records(load=load)))
    store.chats.finish(answer, "error", None, "The disk is full")
    store.close()


def test_unfinished_answers_are_marked_when_the_store_is_opened(tmp_path: Path) -> None:
    store = Store(tmp_path)
    load = load_of(store)
    chat, answer = store.chats.begin(None, "hello", "demo")
    store.token(load, chat, answer, 0, "one ", a_step(), {})
    store.close()
    store = Store(tmp_path)
    told = store.chats.messages(chat)[1]
    assert (told.text, told.state) == ("one ", "interrupted")
    assert store.db.rows("SELECT * FROM pieces") == []
    [load_kept] = store.steps.loads()
    assert load_kept.ended == pytest.approx(load_kept.created + 1.504)
    store.close()


def test_a_regeneration_that_a_crash_ended_before_its_first_token_leaves_the_answer_before_it(tmp_path: Path) -> None:
    store = Store(tmp_path)
    load = load_of(store)
    chat, answer = store.chats.begin(None, "hello", "demo")
    store.token(load, chat, answer, 0, "hi ", a_step(), {})
    store.chats.finish(answer, "done")
    store.chats.begin(chat, None, "demo", answer)
    store.close()
    store = Store(tmp_path)
    assert [(m.text, m.state) for m in store.chats.messages(chat)] == [("hello", "done"), ("hi ", "done")]
    edited = store.chats.messages(chat)[0].id
    store.chats.begin(chat, "hello again", "demo", edited)
    store.close()
    store = Store(tmp_path)
    assert [(m.text, m.state) for m in store.chats.messages(chat)] == [("hello again", "done"), ("", "interrupted")]
    store.close()


CHILD = """
    import sys
    from pathlib import Path
    from app.services.host import Host
    from app.store import Store
    from tests.fakes import FakeEngine, fake_estimate

    class Telling(FakeEngine):
        def __init__(self, spec):
            super().__init__(spec, token_s=0.001)

        def generate(self, *args):
            for piece in super().generate(*args):
                if piece.kind == "token":
                    print("made", piece.token, flush=True)
                yield piece

    host = Host(Store(Path(sys.argv[1])), Telling, fake_estimate)
    host.chats.set_sampling(max_new_tokens=30000)
    host.loader.load(host.loader.plan("demo")).join(20)
    answer, version = host.chats.ask(None, "tell me everything"), -1
    while not answer.finished:
        version = answer.wait(version, 20)
        print("shown", answer.n_tokens, flush=True)
"""


def test_a_kill_costs_at_most_the_token_being_made(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(CHILD), str(tmp_path)], cwd=ROOT, text=True, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        told = ""
        for line in child.stdout:
            told += line
            if line.strip() == "made 60":
                child.kill()  # SIGKILL; TerminateProcess on Windows
                break
        told += child.stdout.read()
    made = max(int(n) for n in re.findall(r"made (\d+)\n", told))
    shown = max(int(n) for n in re.findall(r"shown (\d+)\n", told))
    store = Store(tmp_path)
    [chat] = store.chats.all()
    question, answer = store.chats.messages(chat.id)
    kept = len(answer.text.split())
    assert question.text == "tell me everything"
    assert answer.state == "interrupted"
    assert made - 1 <= kept <= made
    assert kept >= shown
    steps = list(store.steps.records(chat=chat.id))
    assert [s.index for s in steps] == list(range(kept + 1)), "text and statistics differ"
    assert chat.tokens == kept
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
    with pytest.raises(StoreError, match="could not open"):
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
