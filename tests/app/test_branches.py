"""A chat is a tree: edits and regenerations are branches, of which one is shown, asked and gone on with."""

import sqlite3
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from app.services.host import Host
from app.store import Store
from app.store.schema import MIGRATIONS, migrate
from core.errors import BusyError, MoestroError
from tests.app.conftest import GatedEngine, QuickEngine, ended, follow, open_host, open_store, texts


def said(store: Store, chat: int) -> list[str]:
    return [m.text for m in store.chats.messages(chat)]


def answered(store: Store, chat: int | None, text: str | None, words: str, instead_of: int | None = None) -> int:
    chat, answer = store.chats.begin(chat, text, "demo", instead_of)
    store.chats.append(answer, 0, words)
    store.chats.finish(answer, "done")
    return chat


def test_a_branch_is_one_of_its_own_chat(store: Store) -> None:
    one = store.chats.messages(answered(store, None, "one", "first"))[0]
    other = answered(store, None, "elsewhere", "yes")
    for wrong in (one.id, 999):
        with pytest.raises(MoestroError, match="branch no longer exists"):
            store.chats.show(other, wrong)
        with pytest.raises(MoestroError, match="branch no longer exists"):
            store.chats.begin(other, "x", "demo", wrong)
    assert said(store, other) == ["elsewhere", "yes"]


def test_an_edited_answer_is_a_branch_that_the_next_answer_follows(tmp_path: Path) -> None:
    host = open_host(tmp_path)
    first = host.chats.ask(None, "One, in 2 words")
    ended(first)
    chat = first.chat_id
    assert chat is not None
    host.chats.rewrite(chat, first.message_id, " Better. ")
    question, answer = host.chats.messages(chat)
    assert (answer.text, answer.state, answer.stats) == ("Better.", "edited", None)
    assert answer.branches == (first.message_id, answer.id), "what the model wrote stays, as the other branch"
    ended(host.chats.ask(chat, "Two, in 2 words"))
    assert [m.text for m in host.chats.messages(chat)][:3] == [question.text, "Better.", "Two, in 2 words"]
    for wrong, text, why in ((question.id, "x", "not shown any more"), (answer.id, " ", "empty")):
        with pytest.raises(MoestroError, match=why):
            host.chats.rewrite(chat, wrong, text)
    assert len(host.store.chats.tree(chat)) == 5


class Tree(RuleBasedStateMachine):
    """Any sequence of what can be done to a chat, against lists of paths kept by hand."""

    @initialize()
    def begin(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.store = Store(Path(self.folder.name))
        self.chat = answered(self.store, None, "0", "a0")
        self.next = 1
        self.parents: dict[int, int | None] = {}
        self.words: dict[int, str] = {}
        self._learn()

    def _learn(self) -> None:
        for one in self.store.chats.tree(self.chat):
            self.parents[one.id], self.words[one.id] = one.parent, one.text
        self.shown = [m.id for m in self.store.chats.messages(self.chat)]

    def _path(self, leaf: int | None) -> list[int]:
        return [] if leaf is None else [*self._path(self.parents[leaf]), leaf]

    def _act(self, text: str | None, instead_of: int | None, fails: bool) -> None:
        parent = self.shown[-1] if instead_of is None else self.parents[instead_of]
        before, listed = self.shown, self.store.chats.messages(self.chat)
        _, answer = self.store.chats.begin(self.chat, text, "demo", instead_of)
        if fails:
            self.store.chats.undo(answer)
            assert self.store.chats.messages(self.chat) == listed
            return
        self.store.chats.append(answer, 0, f"a{self.next}")
        self.store.chats.finish(answer, "done")
        self._learn()
        new = [answer - 1, answer] if text is not None else [answer]
        assert self.shown == [*self._path(parent), *new] and before
        self.next += 1

    @rule(fails=st.booleans())
    def ask(self, fails: bool) -> None:
        self._act(f"q{self.next}", None, fails)

    @rule(data=st.data(), fails=st.booleans())
    def edit(self, data: st.DataObject, fails: bool) -> None:
        asked = [m.id for m in self.store.chats.messages(self.chat) if m.role == "user"]
        self._act(f"e{self.next}", data.draw(st.sampled_from(asked)), fails)

    @rule(data=st.data(), fails=st.booleans())
    def regenerate(self, data: st.DataObject, fails: bool) -> None:
        given = [m.id for m in self.store.chats.messages(self.chat) if m.role == "assistant"]
        self._act(None, data.draw(st.sampled_from(given)), fails)

    @rule(fails=st.booleans())
    def go_on(self, fails: bool) -> None:
        before = self.store.chats.messages(self.chat)
        begun = self.store.chats.go_on(self.chat, self.shown[-1])
        assert begun.text == before[-1].text
        if fails:
            self.store.chats.undo(self.shown[-1])
            assert self.store.chats.messages(self.chat) == before
            return
        self.store.chats.append(self.shown[-1], 0, "+")
        self.store.chats.finish(self.shown[-1], "done")
        self.words[self.shown[-1]] += "+"

    @rule(data=st.data())
    def show(self, data: st.DataObject) -> None:
        wanted = data.draw(st.sampled_from(sorted(self.parents)))
        under = [one for one in self.parents if wanted in self._path(one)]
        self.store.chats.show(self.chat, wanted)
        self._learn()
        assert self.shown == self._path(max(under))

    @precondition(lambda self: self.next > 2)
    @rule()
    def reopen(self) -> None:
        before = self.store.chats.messages(self.chat)
        self.store.close()
        self.store = Store(Path(self.folder.name))
        assert self.store.chats.messages(self.chat) == before

    @invariant()
    def every_branch_can_be_reached(self) -> None:
        shown = self.store.chats.messages(self.chat)
        for one in shown:
            assert one.branches == tuple(sorted(i for i, p in self.parents.items() if p == one.parent))
            assert one.text == self.words[one.id]

    def teardown(self) -> None:
        self.store.close()
        self.folder.cleanup()


TestTree = Tree.TestCase
TestTree.settings = settings(max_examples=12, stateful_step_count=12, deadline=None)


def row(db: sqlite3.Connection, **values: object) -> None:
    fields: dict[str, Any] = {"chat": 1, "state": "done", "created": 1.0, **values}
    db.execute(
        f"INSERT INTO messages ({', '.join(fields)}) VALUES ({', '.join('?' * len(fields))})", [*fields.values()]
    )


def test_an_old_chat_opens_with_its_replaced_answers_as_branches(tmp_path: Path) -> None:
    """As versions before wrote it: an answer written again, then a question edited, then killed in another answer."""
    old = sqlite3.connect(tmp_path / "moestro.sqlite3", isolation_level=None)
    migrate(old, MIGRATIONS[:5])
    old.execute("INSERT INTO chats (id, title, model, created) VALUES (1, 'old', 'demo', 1.0)")
    row(old, id=1, role="user", text="one")
    row(old, id=2, role="assistant", text="first", asked=1, replaced_by=3)
    row(old, id=3, role="assistant", text="first again")
    row(old, id=4, role="user", text="two", replaced_by=7)
    row(old, id=5, role="assistant", text="second", asked=4, replaced_by=7)
    row(old, id=6, role="user", text="deux")
    row(old, id=7, role="assistant", text="deuxième", asked=6, replaced_by=8)
    row(old, id=8, role="assistant", text="", state="writing")
    old.close()
    store = open_store(tmp_path)
    assert said(store, 1) == ["one", "first again", "deux", "deuxième"], "the answer that was not begun is undone"
    assert [m.branches for m in store.chats.messages(1)] == [(1,), (2, 3), (4, 6), (7,)]
    store.chats.show(1, 4)
    assert said(store, 1) == ["one", "first again", "two", "second"]
    store.chats.show(1, 2)
    assert said(store, 1) == ["one", "first"]


def test_the_next_answer_is_asked_along_the_shown_branch(tmp_path: Path) -> None:
    seen: list[Any] = []

    class Listening(QuickEngine):
        def generate(self, messages: Any, *args: Any, **how: Any) -> Any:
            seen.append(messages)
            return super().generate(messages, *args, **how)

    host = open_host(tmp_path, Listening)
    chat = ended(host.chats.ask(None, "one", "Be brief.")).chat_id
    assert chat is not None
    first = host.chats.messages(chat)[1]
    ended(host.chats.regenerate(chat, first.id))
    host.chats.show(chat, first.id)
    host.chats.set_system(chat, " In Latin. ")
    ended(host.chats.ask(chat, "two", "not for a chat that there is"))
    assert [m["role"] for m in seen[0]] == ["system", "user"] and seen[1] == seen[0], "as at first, when written again"
    assert seen[2] == [
        {"role": "system", "content": "In Latin."},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": first.text},
        {"role": "user", "content": "two"},
    ]
    host.chats.default_system = "Answer in rhyme."
    other = ended(host.chats.ask(None, "three"))
    assert seen[3][0] == {"role": "system", "content": "Answer in rhyme."}
    with pytest.raises(MoestroError, match="not shown any more"):
        host.chats.regenerate(chat, host.chats.messages(chat)[0].id)
    host.close()
    store = open_store(tmp_path)
    assert [(c.id, c.system) for c in store.chats.all()] == [(other.chat_id, "Answer in rhyme."), (chat, "In Latin.")]


def test_a_model_without_a_chat_template_goes_on_with_the_text(tmp_path: Path) -> None:
    seen: list[Any] = []

    class Base(QuickEngine):
        takes_chats = False

        def generate(self, messages: Any, *args: Any, **how: Any) -> Any:
            seen.append(messages)
            return super().generate(messages, *args, **how)

    host = open_host(tmp_path, Base)
    host.chats.set_sampling(max_new_tokens=3)
    chat = ended(host.chats.ask(None, "Once upon a time", "unused")).chat_id
    ended(host.chats.ask(chat, "The end of"))
    assert seen[0] == "Once upon a time"
    assert seen[1] == f"Once upon a time{texts(host, chat)[1][1]}The end of"
    host.chats.set_sampling(max_new_tokens=2)
    ended(host.chats.ask(chat, "it"))
    assert seen[2].startswith(seen[1]) and seen[2].endswith("it")


def test_no_branch_is_left_while_it_is_written(gated_host: Host, gated: type[GatedEngine]) -> None:
    answer = gated_host.chats.ask(None, "one")
    assert answer.chat_id is not None
    follow(answer, lambda a: a.state == "prefill")
    question = gated_host.chats.messages(answer.chat_id)[0]
    with pytest.raises(BusyError, match="being answered"):
        gated_host.chats.show(answer.chat_id, question.id)
    gated.gate.release(100)
    ended(answer)
    gated_host.chats.show(answer.chat_id, question.id)
    assert len(gated_host.chats.messages(answer.chat_id)) == 2


def test_chats_are_found_by_title_and_by_what_was_said_on_any_branch(store: Store) -> None:
    caches = answered(store, None, "How do caches work?", "They keep what is ASKED for: Übung hilft, 100 % of it_")
    answered(store, caches, None, "no such word", store.chats.messages(caches)[1].id)
    routers = answered(store, None, "Routers", f"{'x ' * 99}a cache {'y ' * 99}")

    def found(query: str) -> list[int]:
        return [one.chat for one in store.search_chats(query)]

    assert found("cache") == [routers, caches]
    assert found("  CACHES how ") == [caches]
    assert found("übung asked") == [caches], "on a branch that is not shown"
    assert found("100 %") == [caches] and found("it_") == [caches] and found("%") == [caches]
    assert found("caches übung") == [], "not in one place"
    assert found("nowhere") == found("") == found("  ") == []
    assert [one.chat for one in store.search_chats("cache", most=1)] == [routers]
    hit, _ = store.search_chats("a cache")
    assert "a cache" in hit.excerpt and hit.excerpt.startswith("…") and hit.excerpt.endswith("…")
    assert len(hit.excerpt) < 100 and hit.message == store.chats.messages(routers)[1].id
    assert [(one.message, one.excerpt) for one in store.search_chats("routers")] == [(None, "")]
