"""An answer that was cut is continued in its place: what it says, what it rests on, and what a failure leaves."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from app.services.exports.archive import contents
from app.services.exports.timeline import write
from app.services.exports.transcript import as_json, markdown
from app.services.host import Host
from app.store import Store
from app.ui.tabs.messages import is_cut, shown, used_tokens
from core.errors import BusyError, ContextError, MoestroError
from core.types import Begun
from tests.app.conftest import GatedEngine, QuickEngine, ended, follow, open_host, open_store, texts
from tests.app.records import a_step, load_of

WORDS = "the cache keeps what the router asks for and fetches what it lacks . ".split(" ")[:-1]


def said(count: int) -> str:
    return "".join(f"{WORDS[at % len(WORDS)]} " for at in range(count))


class Listening(QuickEngine):
    """Keeps what it is asked; fails at once while `failing`."""

    asked: list[tuple[Any, Any]]
    failing = False

    def generate(self, messages: Any, sampling: Any, cancel: Any = None, **how: Any) -> Any:
        self.asked.append((messages, sampling))
        if self.failing:
            raise ContextError("The chat is too long.")
        return super().generate(messages, sampling, cancel)


@pytest.fixture
def listening() -> type[Listening]:
    return type("Listening", (Listening,), {"asked": []})


def begun(host: Host, text: str = "One") -> tuple[int, int]:
    """(chat, answer) of one that its limit cut after 12 tokens."""
    answer = ended(host.chats.ask(None, text))
    assert answer.chat_id is not None and answer.message_id is not None
    return answer.chat_id, answer.message_id


def test_an_answer_that_its_limit_cut_goes_on_in_its_place(tmp_path: Path, listening: type[Listening]) -> None:
    host = open_host(tmp_path, listening)
    host.chats.set_sampling(temperature=0.7)
    chat, answer = begun(host)
    assert [one["cut"] for one in shown(host.chats.messages(chat))["messages"]] == [False, True]
    host.chats.set_sampling(temperature=0.0, max_new_tokens=5)
    more = ended(host.chats.go_on(chat, answer))
    assert (more.message_id, more.text, more.n_tokens) == (answer, said(17), 5)
    question, whole = host.chats.messages(chat)
    assert (whole.id, whole.text, whole.state, whole.branches) == (answer, said(17), "done", (answer,))
    assert whole.stats is not None
    assert (whole.stats["new_tokens"], whole.stats["begun_tokens"]) == (5, 12)
    assert "5 tokens more, after 12" in shown([question, whole])["messages"][1]["line"]
    assert used_tokens([question, whole]) == whole.stats["prompt_tokens"] + 5
    (_, first), (asked, second) = listening.asked
    assert asked == Begun([{"role": "user", "content": "One"}], said(12), tuple(range(1, 13)))
    assert (second.temperature, second.seed) == (first.temperature, first.seed) == (0.7, first.seed), "as it was begun"
    assert first.seed >= 0 and second.max_new_tokens == 5
    assert host.store.chats.find(chat).tokens == 17  # type: ignore[union-attr]
    assert len([s for s in host.store.steps.records(chat=chat) if s.phase == "decode"]) == 17
    [answers] = csv.DictReader(contents(host.store, chat, None)["answers.csv"].splitlines())
    assert (answers["begun_tokens"], answers["new_tokens"]) == ("12", "5")
    timeline = json.loads(write(host.store, tmp_path / "timeline.json", chat).read_text("utf-8"))
    assert sum(one["name"] == "token" for one in timeline["traceEvents"]) == 17
    assert said(17).strip() in markdown(host.store, chat) and said(17) in as_json(host.store, chat)
    ended(host.chats.go_on(chat, answer))
    assert texts(host, chat)[-1] == ("assistant", said(22), "done") and len(listening.asked[-1][0].ids) == 17


def test_a_continuation_that_fails_leaves_the_answer_as_it_was(tmp_path: Path, listening: type[Listening]) -> None:
    host = open_host(tmp_path, listening)
    chat, answer = begun(host)
    before = host.chats.messages(chat)
    listening.failing = True
    failed = ended(host.chats.go_on(chat, answer))
    assert failed.undone and "too long" in failed.error
    assert host.chats.messages(chat) == before


def test_one_that_was_stopped_goes_on_and_can_be_stopped_again(gated_host: Host, gated: type[GatedEngine]) -> None:
    chats, answer = gated_host.chats, gated_host.chats.ask(None, "One")
    assert answer.chat_id is not None and answer.message_id is not None
    for tokens in (3, 7):
        gated.gate.release(4)
        follow(answer, lambda one, tokens=tokens: len(one.text.split()) >= tokens)  # type: ignore[misc]
        assert chats.messages(answer.chat_id)[-1].state == "writing"
        with pytest.raises(BusyError, match="already being answered"):
            chats.go_on(answer.chat_id, answer.message_id)
        chats.stop(answer.chat_id)
        ended(answer)
        count = len(answer.text.split())
        assert texts(gated_host, answer.chat_id)[-1] == ("assistant", said(count), "stopped")
        answer = chats.go_on(answer.chat_id, answer.message_id)
    chats.stop(answer.chat_id)
    ended(answer)


def test_what_a_crash_leaves_of_a_continuation_goes_on(tmp_path: Path, listening: type[Listening]) -> None:
    store = Store(tmp_path)
    load = load_of(store)
    chat, answer = store.chats.begin(None, "One", "demo")
    store.chats.keep_sampling(answer, {"temperature": 0.5, "seed": 3})
    for seq, word in enumerate(said(4).split()):
        store.token(load, chat, answer, seq, f"{word} ", a_step(seq), {}, seq + 1)
    store.chats.finish(answer, "stopped")
    store.chats.go_on(chat, answer)
    store.close()  # before a token of it
    store = Store(tmp_path)
    assert [(m.text, m.state) for m in store.chats.messages(chat)] == [("One", "done"), (said(4), "stopped")]
    store.chats.go_on(chat, answer)
    store.token(load, chat, answer, 0, "", None, {}, 5)  # the first half of a character
    store.close()
    store = Store(tmp_path)
    told = store.chats.messages(chat)[1]
    assert (told.text, told.state) == (said(4), "interrupted") and is_cut(told)
    store.close()
    host = open_host(tmp_path, listening, tokens=3)
    ended(host.chats.go_on(chat, answer))
    asked, sampling = listening.asked[0]
    assert asked == Begun([{"role": "user", "content": "One"}], said(4), (1, 2, 3, 4, 5))
    assert (sampling.temperature, sampling.seed) == (0.5, 3)


def test_an_edited_answer_goes_on_as_the_template_puts_it(tmp_path: Path, listening: type[Listening]) -> None:
    """Its tokens are nobody's; what the model wrote stays beside it."""
    host = open_host(tmp_path, listening)
    chat, answer = begun(host)
    host.chats.rewrite(chat, answer, "My words")
    edited = host.chats.messages(chat)[-1]
    assert is_cut(edited)
    for text in ("My words", None):
        ended(host.chats.go_on(chat, edited.id))
        asked = listening.asked[-1][0]
        assert asked.ids == () and asked.text == (text or host.store.chats.tree(chat)[-1].text[: len(asked.text)])
    assert host.chats.messages(chat)[-1].branches == (answer, edited.id)
    assert host.store.chats.tree(chat)[1].text == said(12)


def test_only_the_last_answer_shown_is_continued(host: Host) -> None:
    chat, answer = begun(host)
    ended(host.chats.ask(chat, "Two"))
    question, other = host.chats.messages(chat)[-2:]
    for wrong in (answer, question.id, 999):
        with pytest.raises(MoestroError, match="Only the last answer"):
            host.chats.go_on(chat, wrong)
    assert not is_cut(question) and shown(host.chats.messages(chat))["messages"][1]["cut"] is False
    ended(host.chats.go_on(chat, other.id))
    assert texts(host, chat)[-1][1] == said(24)


def test_damaged_tokens_and_settings_are_as_unknown_ones(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    chat, answer = store.chats.begin(None, "One", "demo")
    store.chats.append(answer, 0, "word", 7)
    store.chats.finish(answer, "stopped")
    for tokens, sampling in ((b"123", "[]"), ("text", "{"), (None, None)):
        store.db.rows("UPDATE messages SET tokens = ?, sampling = ? WHERE id = ?", tokens, sampling, answer)
        assert store.chats.go_on(chat, answer) == ("word", None, {})
        store.chats.undo(answer)
