"""What a crash, a kill or a full disk costs: at most the token being made; words come before figures."""

import re
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.server.live_state import answer_state, stamp
from app.services.host import Host
from app.services.progress import Answer
from app.store import RESERVE, FullError, Store, StoreError
from app.ui.tabs.messages import shown
from tests.app.conftest import WAIT_S, GatedEngine, QuickEngine, ended, follow, open_host, open_store, texts
from tests.app.records import a_step, load_of

ROOT = Path(__file__).resolve().parents[2]


def test_a_token_is_committed_whole_or_not_at_all(store: Store) -> None:
    load = load_of(store)
    chat, answer = store.chats.begin(None, "hello", "demo")
    store.token(load, chat, answer, 0, "one ", a_step(0), {})
    with pytest.raises(StoreError, match="could not save"):
        store.token(999, chat, answer, 1, "two ", a_step(1), {})  # no such load: the second of its two rows fails
    assert store.chats.messages(chat)[1].text == "one "
    store.token(load, chat, answer, 1, "two ", a_step(1), {})
    assert store.chats.messages(chat)[1].text == "one two "


def test_a_full_disk_is_told_and_the_store_goes_on(store: Store) -> None:
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


def test_unfinished_answers_are_marked_when_the_store_is_opened(tmp_path: Path) -> None:
    store = Store(tmp_path)
    load = load_of(store)
    chat, answer = store.chats.begin(None, "hello", "demo")
    store.token(load, chat, answer, 0, "one ", a_step(), {})
    store.close()
    store = open_store(tmp_path)
    told = store.chats.messages(chat)[1]
    assert (told.text, told.state) == ("one ", "interrupted")
    assert store.db.rows("SELECT * FROM pieces") == []
    [load_kept] = store.steps.loads()
    assert load_kept.ended == pytest.approx(load_kept.created + 1.504)


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
    store = open_store(tmp_path)
    assert [(m.text, m.state) for m in store.chats.messages(chat)] == [("hello again", "done"), ("", "interrupted")]


CHILD = """
    import sys
    from pathlib import Path
    from app.services.host import Host
    from app.store import Store
    from tests.fake_models import fake_estimate
    from tests.fakes import FakeEngine

    class Telling(FakeEngine):
        def __init__(self, spec):
            super().__init__(spec, token_s=0.001)

        def generate(self, *args, **how):
            for piece in super().generate(*args, **how):
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
        told = ""
        for line in child.stdout:
            told += line
            if line.strip() == "made 60":
                child.kill()  # SIGKILL; TerminateProcess on Windows
                break
        told += child.stdout.read()
    made = max(int(n) for n in re.findall(r"made (\d+)\n", told))
    shown = max(int(n) for n in re.findall(r"shown (\d+)\n", told))
    store = open_store(tmp_path)
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


def fill(store: Store, pages: int = 0) -> None:
    """From now on the file may grow by so many pages."""
    store.db.rows("VACUUM")
    used = store.db.rows("PRAGMA page_count")[0][0]
    store.db.rows(f"PRAGMA max_page_count = {used + pages}")


def free(store: Store) -> None:
    store.db.rows("PRAGMA max_page_count = 1000000")


class Long(GatedEngine):
    """Its words are long, so that each needs pages of its own."""

    def generate(self, *asked: object, **named: object) -> Iterator[object]:  # type: ignore[override]
        for piece in super().generate(*asked, **named):  # type: ignore[arg-type]
            if piece.text:
                object.__setattr__(piece, "text", piece.text.strip() * 4000 + " ")
            yield piece


@pytest.fixture
def full(tmp_path: Path, gated: type[GatedEngine]) -> Host:
    return open_host(tmp_path, type("LongGated", (Long,), {"gate": gated.gate}))


def test_figures_give_way_to_words(store: Store) -> None:
    load = load_of(store)
    chat, answer = store.chats.begin(None, "hello", "demo")
    fill(store, pages=1)
    kept = [store.token(load, chat, answer, seq, "word ", a_step(seq), {}) for seq in range(200)]
    assert kept[0]
    assert not kept[-1], "there was room for every record: the test fills nothing"
    assert store.chats.messages(chat)[1].text == "word " * 200
    assert len(list(store.steps.records(load=load))) == sum(kept)
    free(store)
    assert True in [store.token(load, chat, answer, seq, "word ", a_step(seq), {}) for seq in range(200, 240)]


def test_the_last_room_is_left_to_words(tmp_path: Path) -> None:
    left = RESERVE - 1
    store = open_store(tmp_path, lambda folder: left)
    load = load_of(store)
    chat, answer = store.chats.begin(None, "hello", "demo")
    assert True not in [store.token(load, chat, answer, seq, "a ", a_step(seq), {}) for seq in range(40)]
    left = RESERVE
    assert store.token(load, chat, answer, 40, "a ", a_step(40), {}) is False, "the system is asked at every pass"
    assert True in [store.token(load, chat, answer, seq, "a ", a_step(seq), {}) for seq in range(41, 80)]
    assert store.chats.messages(chat)[1].text == "a " * 80


def test_an_answer_goes_on_and_is_saved_later(full: Host, gated: type[GatedEngine], tmp_path: Path) -> None:
    answer = full.chats.ask(None, "hello")
    gated.gate.release(3)
    follow(answer, lambda a: a.n_tokens == 3)
    fill(full.store)
    gated.gate.release(3)
    follow(answer, lambda a: a.n_tokens == 6)
    assert "The disk is full" in answer.unsaved
    told = answer_state(answer, None, 0)
    assert "The disk is full" in told["unsaved"]
    gated.gate.release(100)
    assert (ended(answer).state, answer.error, answer.n_tokens) == ("done", "", 12)
    chat = answer.chat_id
    assert texts(full, chat)[1] == ("assistant", answer.text, "done")
    assert "Not saved: The disk is full" in str(shown(full.chats.messages(chat or 0))["messages"][1]["line"])
    before = stamp(full, chat)
    with pytest.raises(FullError, match="disk is full"):  # nothing newer gets before it, and nothing changes
        full.chats.ask(chat, "more")
    with pytest.raises(FullError, match="disk is full"):
        full.chats.regenerate(chat or 0)
    assert texts(full, chat)[1] == ("assistant", answer.text, "done")
    assert len(texts(full, chat)) == 2

    free(full.store)
    again = full.chats.ask(chat, "more")
    assert stamp(full, chat) != before, "a page would go on saying that it is not saved"
    ended(again)
    assert [text for _, text, _ in texts(full, chat)][1:3] == [answer.text, "more"]
    message = full.chats.messages(chat or 0)[1]
    assert message.stats["unrecorded"] > 0
    assert not message.unsaved
    full.close()
    store = open_store(tmp_path)
    assert store.chats.messages(chat or 0)[1].text == answer.text


def unsaved_answer(full: Host, gated: type[GatedEngine]) -> Answer:
    answer = full.chats.ask(None, "hello")
    gated.gate.release(1)
    follow(answer, lambda a: a.n_tokens == 1)
    fill(full.store)
    gated.gate.release(100)
    assert ended(answer).unsaved
    return answer


def test_it_is_saved_without_being_asked(full: Host, gated: type[GatedEngine], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.services.writer.AGAIN_S", 0.01)
    answer = unsaved_answer(full, gated)
    save, saved = full.chats._writer.unsaved.save, threading.Event()

    def noticed(chat: int | None = None) -> None:
        save(chat)
        if not answer.unsaved:
            saved.set()

    monkeypatch.setattr(full.chats._writer.unsaved, "save", noticed)
    free(full.store)
    assert saved.wait(WAIT_S)
    assert full.store.chats.messages(answer.chat_id or 0)[1].text == answer.text


def test_what_cannot_be_saved_yet_is_saved_at_the_end(full: Host, gated: type[GatedEngine], tmp_path: Path) -> None:
    answer = unsaved_answer(full, gated)
    free(full.store)
    full.close()
    store = open_store(tmp_path)
    told = store.chats.messages(answer.chat_id or 0)[1]
    assert (told.text, told.state) == (answer.text, "done")


def test_settings_act_and_are_remembered_later(tmp_path: Path) -> None:
    host = open_host(tmp_path, QuickEngine)
    fill(host.store)
    with pytest.raises(FullError):
        host.store.db.put("filler", "x" * 100_000)
    host.remembered.put("folders", ["y" * 100_000])  # what is too large takes what fits with it ...
    assert host.models.change("eviction", "fifo") == ""
    assert host.models.settings["eviction"] == "fifo"
    assert host.chats.set_sampling(temperature=0.25) == ""
    free(host.store)
    assert host.models.change("regret", False) == ""  # ... and everything is tried again
    host.close()
    host = open_host(tmp_path, QuickEngine, loaded=False)
    assert (host.models.settings["eviction"], host.chats.sampling.temperature) == ("fifo", 0.25)


def test_a_full_disk_keeps_nobody_from_unloading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host = open_host(tmp_path, QuickEngine)

    def refuse(load: int) -> None:
        raise FullError("The disk is full: Moestro could not save. Free some space, then try again.")

    monkeypatch.setattr(host.store.steps, "end_load", refuse)
    host.models.unload()
    assert host.models.model is None
