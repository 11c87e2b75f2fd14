"""What a crash, a kill or a full disk costs the store: at most the token being made, and never half of one."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from app.store import Store, StoreError
from tests.app.records import a_step, load_of

ROOT = Path(__file__).resolve().parents[2]


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
