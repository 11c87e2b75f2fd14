"""The host over a fake engine: answers, their queue, and what happens when things go wrong."""

import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from app.services.host import Host
from app.store import StoreError
from core.errors import BusyError, ContextError, ModelError, MoestroError
from core.types import Piece
from tests.app.conftest import GatedEngine, QuickEngine, asked, ended, follow, open_host, open_store, texts
from tests.logged import Logged


def test_an_answer_is_streamed_counted_and_kept(gated_host: Host, gated: type[GatedEngine]) -> None:
    answer = gated_host.chats.ask(None, "  Why do caches work?  ")
    follow(answer, lambda a: a.prefill_done == a.prefill_total > 0)
    gated.gate.release(3)  # the prefill's own and two tokens'
    follow(answer, lambda a: a.n_tokens == 3)
    assert answer.state == "streaming"
    assert answer.chat_id is not None
    assert gated_host.chats.answer(answer.chat_id) is answer  # what a reloaded tab finds
    assert texts(gated_host, answer.chat_id)[1] == ("assistant", "the cache keeps ", "writing")
    gated.gate.release(100)
    ended(answer)
    assert (answer.state, answer.error, answer.n_tokens) == ("done", "", 12)
    question, told = gated_host.chats.messages(answer.chat_id)
    assert question.text == "Why do caches work?"
    assert (told.text, told.state) == (answer.text, "done")
    assert told.stats["new_tokens"] == 12
    assert gated_host.chats.answer(answer.chat_id) is None
    steps = list(gated_host.store.steps.records(chat=answer.chat_id))
    assert [s.phase for s in steps] == ["prefill"] + ["decode"] * 12


def test_two_generations_at_once_take_turns(gated_host: Host, gated: type[GatedEngine]) -> None:
    first, second, third = (gated_host.chats.ask(None, text) for text in ("one", "two", "three"))
    asked_s = time.perf_counter()
    follow(first, lambda a: a.state == "prefill")
    assert (second.state, third.state, gated_host.chats.waiting) == ("queued", "queued", 2)
    waited_ms = 1000 * (time.perf_counter() - asked_s)  # by both others, which nothing can begin before the gate opens
    gated.gate.release(1000)
    assert [ended(answer).state for answer in (first, second, third)] == ["done"] * 3
    assert gated.most_together == 1
    order = [s.index for chat in (1, 2, 3) for s in gated_host.store.steps.records(chat=chat)]
    assert order == sorted(order), "answers were not written in the order in which they were asked for"
    assert second.queued_ms >= waited_ms <= third.queued_ms


def test_a_second_answer_in_the_same_chat_is_refused(gated_host: Host, gated: type[GatedEngine]) -> None:
    answer = gated_host.chats.ask(None, "one")
    assert answer.chat_id is not None
    chat = answer.chat_id
    for ask in (
        lambda: gated_host.chats.ask(chat, "two"),
        lambda: gated_host.chats.regenerate(chat),
        lambda: gated_host.chats.edit(chat, gated_host.chats.messages(chat)[0].id, "two"),
        lambda: gated_host.chats.delete(chat),
    ):
        with pytest.raises(BusyError, match="being answered"):
            ask()
    gated.gate.release(100)
    ended(answer)
    assert len(gated_host.chats.messages(chat)) == 2


def test_a_message_without_a_model_is_refused(tmp_path: Path) -> None:
    host = open_host(tmp_path, loaded=False)
    with pytest.raises(ModelError, match="No model is loaded"):
        host.chats.ask(None, "hello")
    assert host.store.chats.all() == []


def test_an_empty_message_and_a_chat_that_is_gone_are_refused(host: Host) -> None:
    for text in ("", "  \n\t"):
        with pytest.raises(MoestroError, match="empty"):
            host.chats.ask(None, text)
    assert host.store.chats.all() == []
    for ask in (
        lambda: host.chats.ask(77, "hello"),
        lambda: host.chats.regenerate(77),
        lambda: host.chats.edit(77, 0, "hello"),
        lambda: host.chats.delete(77),
        lambda: host.chats.rename(77, "new"),
    ):
        with pytest.raises(MoestroError, match="no longer exists"):
            ask()


class ShortEngine(QuickEngine):
    """Has a context of 40 tokens and says so as the real engine does: at the first piece."""

    def generate(self, messages: Any, sampling: Any, cancel: Any = None, **how: Any) -> Iterator[Piece]:
        if not isinstance(messages, str) and self.count_tokens(messages) > 40:
            raise ContextError("The chat has more tokens than the context holds.")
        yield from super().generate(messages, sampling, cancel)


def test_a_prompt_longer_than_the_context_changes_nothing(tmp_path: Path) -> None:
    host = open_host(tmp_path, ShortEngine)
    answer = ended(host.chats.ask(None, "word " * 50))
    assert (answer.state, answer.undone, answer.text) == ("error", True, "")
    assert "context" in answer.error
    assert answer.chat_id is not None and host.store.chats.all() == []

    chat = asked(host, None, "short")
    before = texts(host, chat)
    assert ended(host.chats.ask(chat, "word " * 50)).undone
    first = host.chats.messages(chat)[0].id
    assert ended(host.chats.edit(chat, first, "word " * 50)).undone
    assert texts(host, chat) == before
    assert ended(host.chats.edit(chat, first, "still short")).error == ""
    assert texts(host, chat)[0][:2] == ("user", "still short")


def test_stop_keeps_what_was_written_and_undoes_what_was_not_begun(gated_host: Host, gated: type[GatedEngine]) -> None:
    first, second = gated_host.chats.ask(None, "one"), gated_host.chats.ask(None, "two")
    assert first.chat_id is not None
    assert second.chat_id is not None
    gated.gate.release(3)
    follow(first, lambda a: a.n_tokens == 3)
    gated_host.chats.stop(second.chat_id)
    assert (second.state, second.undone) == ("done", True)
    gated_host.chats.stop(first.chat_id)
    ended(first)
    assert (first.state, first.error, first.undone) == ("done", "", False)
    assert first.stats.reason == "cancelled"
    assert texts(gated_host, first.chat_id) == [("user", "one", "done"), ("assistant", "the cache keeps ", "stopped")]
    assert [c.title for c in gated_host.store.chats.all()] == ["one"]
    gated_host.chats.stop(first.chat_id)  # nothing left to stop
    gated_host.chats.stop(999)


def test_regenerate_and_edit_replace_what_follows(host: Host) -> None:
    chat = asked(host, None, "one")
    ended(host.chats.ask(chat, "two"))
    old = [m.id for m in host.chats.messages(chat)]
    assert ended(host.chats.regenerate(chat)).error == ""
    new = [m.id for m in host.chats.messages(chat)]
    assert new[:3] == old[:3]
    assert new[3] > old[3]
    ended(host.chats.edit(chat, old[0], "uno"))
    assert texts(host, chat)[0][1] == "uno"
    assert len(host.chats.messages(chat)) == 2
    for message in (host.chats.messages(chat)[1].id, old[0], -1):
        with pytest.raises(MoestroError, match="Only your own messages"):
            host.chats.edit(chat, message, "no")
    assert len(list(host.store.steps.records(chat=chat))) == 4 * 13, "figures of replaced answers are kept"


def test_close_stops_saves_and_refuses_more(tmp_path: Path, gated: type[GatedEngine]) -> None:
    host = open_host(tmp_path, gated)
    first, second = host.chats.ask(None, "one"), host.chats.ask(None, "two")
    gated.gate.release(4)
    follow(first, lambda a: a.n_tokens == 4)
    host.close()
    host.close()
    assert (first.finished, second.finished) == (True, True)
    with pytest.raises(MoestroError):
        host.chats.ask(None, "three")
    store = open_store(tmp_path)
    assert first.chat_id is not None
    assert [(m.text, m.state) for m in store.chats.messages(first.chat_id)] == [
        ("one", "done"),
        ("the cache keeps what ", "stopped"),
    ]
    assert [c.title for c in store.chats.all()] == ["one"]
    assert store.steps.loads()[0].ended is not None


class BrokenEngine(QuickEngine):
    """Breaks at the fourth token of its first answer."""

    def generate(self, messages: Any, sampling: Any, cancel: Any = None, **how: Any) -> Iterator[Piece]:
        first = not self._steps
        for number, piece in enumerate(super().generate(messages, sampling, cancel)):
            if first and number == 4:
                raise ZeroDivisionError("slot 7 of nothing")
            yield piece


def test_an_unexpected_error_mid_answer_is_told_plainly_and_logged(tmp_path: Path, caplog: Logged) -> None:
    host = open_host(tmp_path, BrokenEngine)
    with caplog.at_level(logging.ERROR, "moestro.app"):
        answer = ended(host.chats.ask(None, "hello"))
    assert answer.state == "error"
    assert "error inside Moestro" in answer.error
    assert "slot 7" not in answer.error
    assert "builtins.ZeroDivisionError" in caplog.text and "test_host.py" in caplog.text
    assert texts(host, answer.chat_id)[1] == ("assistant", "the cache keeps ", "error")
    assert QuickEngine.together == BrokenEngine.together == 0, "the broken answer still holds the engine"
    assert answer.chat_id is not None
    again = ended(host.chats.regenerate(answer.chat_id))
    assert (again.state, again.n_tokens) == ("done", 12)


def test_a_store_that_fails_mid_answer_costs_no_word(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    original, calls = host.store.token, 0

    def token(*args: Any) -> bool:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise StoreError("Moestro could not save: the disk failed.")
        return original(*args)

    monkeypatch.setattr(host.store, "token", token)
    answer = ended(host.chats.ask(None, "hello"))
    assert (answer.state, answer.error, answer.unsaved, answer.n_tokens) == ("done", "", "", 12)
    assert texts(host, answer.chat_id)[1] == ("assistant", answer.text, "done")
    assert len(answer.text.split()) == 12
    assert ended(host.chats.ask(answer.chat_id, "again")).error == ""


def test_an_answer_that_breaks_off_lets_go_of_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Any] = []  # a reference, so that only an explicit close can end the generator

    class Kept(QuickEngine):
        def generate(self, messages: Any, sampling: Any, cancel: Any = None, **how: Any) -> Iterator[Piece]:
            kept.append(super().generate(messages, sampling, cancel))
            return iter(kept[-1])

    def broken(*args: Any) -> None:
        raise MoestroError("It does not go on.")

    host = open_host(tmp_path, Kept)
    monkeypatch.setattr(host.regret, "add", broken)
    answer = ended(host.chats.ask(None, "hello"))
    assert (answer.error, answer.undone) == ("It does not go on.", True)
    assert kept[0].gi_frame is None, "the generator is still open and with it the engine's leases"
