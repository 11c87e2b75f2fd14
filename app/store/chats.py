"""Chats and messages. An answer is begun, extended token by token, and finished; or undone without a trace.

A chat is a tree: a message follows its `parent`, and an edit or a regeneration is another child of the same parent.
What is shown and sent to the model is the path from the first message to the chat's `leaf`. A parent is older than its
children.
"""

import json
import logging
import re
import sqlite3
import time
from dataclasses import dataclass
from typing import Any, Literal

from app.store.database import Database
from app.store.row_checks import InvalidRow, quality_of, stats_of
from core.errors import MoestroError

log = logging.getLogger("moestro.store")
State = Literal["writing", "done", "stopped", "error", "interrupted", "edited"]
TITLE_CHARS = 60
ATTACHED = re.compile(r"(?:^|\n)File ([^\n]+):\n(`{3,})\n.*?\n\2(?=\n|$)", re.DOTALL)  # assets/ui/chat/attach.js
PINNED = "pinned_chats"  # store key
LINE = "c.id, c.title, c.model, c.created, CASE typeof(c.system) WHEN 'text' THEN c.system ELSE '' END AS system"
UP = "UNION ALL SELECT m.id, m.parent FROM path JOIN messages m ON m.id = path.parent AND m.id < path.id"
BRANCH = f"WITH RECURSIVE path(id, parent) AS (SELECT id, parent FROM messages WHERE id = c.leaf {UP})"
UNTOLD = "(SELECT count(*) FROM steps WHERE chat = c.id AND phase = 'decode' AND answer = m.id)"  # it has no figures
SUMS = f"""coalesce((SELECT max(created) FROM messages WHERE chat = c.id), c.created) AS updated,
    ({BRANCH} SELECT count(*) FROM path) AS messages,
    ({BRANCH} SELECT CAST(total(CASE WHEN role = 'user' THEN 0 WHEN json_valid(stats)
        THEN json_extract(stats, '$.new_tokens') ELSE {UNTOLD} END) AS INTEGER)
     FROM path JOIN messages m ON m.id = path.id) AS tokens"""
FIELDS = "m.id, m.role, m.text, m.state, m.error, m.stats, m.created, m.quality, m.parent"
SHOWN = f"""WITH RECURSIVE path(id, parent) AS (
    SELECT id, parent FROM messages WHERE id = (SELECT leaf FROM chats WHERE id = ?) AND chat = ? {UP})
    SELECT {FIELDS} FROM path JOIN messages m ON m.id = path.id ORDER BY m.id"""
EVERY = f"SELECT {FIELDS} FROM messages m WHERE m.chat = ? ORDER BY m.id"
NEWEST = """WITH RECURSIVE under(id) AS (
    SELECT id FROM messages WHERE id = ? AND chat = ?
    UNION ALL SELECT m.id FROM under JOIN messages m ON m.chat = ? AND m.parent = under.id AND m.id > under.id)
    SELECT max(id) AS id FROM under"""
GONE = "That chat no longer exists. Pick another one, or start a new chat."
NO_BRANCH = "That branch no longer exists. Reload the page."


@dataclass(frozen=True, slots=True)
class Chat:
    """One line of the history. `created` and `updated` are seconds since the epoch; `messages` = those of the branch
    that is shown; `tokens` = of its answers, as the lines under them count; `system` = the system prompt.
    """

    id: int
    title: str
    model: str
    created: float
    updated: float
    system: str
    messages: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Message:
    """One message as shown. `stats`, for a finished answer: the fields of `core.types.AnswerStats`, and `queued_ms`.
    `quality`, for one scored against the exact model: the fields of `core.engine.quality.report.Quality`. `unsaved`:
    why its text is only in memory. `branches`: the messages at its place in the chat, by age, itself included.
    """

    id: int
    role: Literal["user", "assistant"]
    text: str
    state: State
    error: str
    stats: dict[str, Any] | None
    created: float
    quality: dict[str, Any] | None = None
    unsaved: str = ""
    parent: int | None = None
    branches: tuple[int, ...] = ()


class Chats:
    """All chats of one database. `version` changes whenever the list of chats does."""

    def __init__(self, db: Database) -> None:
        self._db = db
        self.version = int(time.time() * 1000)  # differs after a restart, too
        self._logged_damaged: set[int] = set()  # messages whose damaged figures have been logged
        for row in db.rows("SELECT id, asked FROM messages WHERE state = 'writing'"):  # left by a crash
            if row["asked"] is None and not self._written(row["id"]):
                self.undo(row["id"])  # a regeneration without any text: the previous answer is restored
            else:
                self.finish(row["id"], "interrupted")
        lost = db.rows(
            "SELECT id FROM chats c WHERE NOT EXISTS (SELECT 1 FROM messages WHERE id = c.leaf AND chat = c.id)"
        )
        if lost:  # as no version of Moestro leaves it: the newest message is shown
            with db.tx() as tx:
                tx.executemany(
                    "UPDATE chats SET leaf = (SELECT max(id) FROM messages WHERE chat = chats.id) WHERE id = ?",
                    [(row["id"],) for row in lost],
                )

    def all(self) -> list[Chat]:
        """Every chat, most recently changed first."""
        return [
            Chat(**dict(row))
            for row in self._db.rows(f"SELECT {LINE}, {SUMS} FROM chats c ORDER BY updated DESC, c.id DESC")
        ]

    def find(self, chat: int) -> Chat | None:
        """A chat's line in the history; None if there is no such chat."""
        found = self._db.rows(f"SELECT {LINE}, {SUMS} FROM chats c WHERE c.id = ?", chat)
        return Chat(**dict(found[0])) if found else None

    def messages(self, chat: int, writing: str | None = None) -> list[Message]:
        """The messages of a chat's shown branch, oldest first. Raises MoestroError if there is no such chat.

        `writing` = the text so far of the answer being written, if the caller has it; avoids reading every piece.
        """
        with self._db.tx():  # all queries see one state
            self.require(chat)
            return self._read(chat, self._db.rows(SHOWN, chat, chat), writing)

    def tree(self, chat: int) -> list[Message]:
        """The messages of all branches of a chat, oldest first. Raises MoestroError if there is no such chat."""
        with self._db.tx():
            self.require(chat)
            return self._read(chat, self._db.rows(EVERY, chat), None)

    def require(self, chat: int) -> None:
        """Raises MoestroError if there is no such chat."""
        if not self._db.rows("SELECT 1 FROM chats WHERE id = ?", chat):
            raise MoestroError(GONE)

    def begin(
        self, chat: int | None, text: str | None, model: str, instead_of: int | None = None, system: str = ""
    ) -> tuple[int, int]:
        """Start an answer, after a new user message when `text` is given; returns (chat, answer) ids.

        `chat` None creates a chat titled by `text` with the system prompt `system`. What is begun follows the last
        message shown, or is another branch next to message `instead_of`; it is shown from now on, until the answer is
        undone.
        """
        now = time.time()
        with self._db.tx() as db:
            if chat is None:
                values = (_title(text or ""), model, now, system)
                made = db.execute("INSERT INTO chats (title, model, created, system) VALUES (?, ?, ?, ?)", values)
                chat = int(made.lastrowid or 0)
            self.require(chat)
            leaf = self._db.rows("SELECT leaf FROM chats WHERE id = ?", chat)[0]["leaf"]
            parent = leaf
            if instead_of is not None:
                found = self._db.rows("SELECT parent FROM messages WHERE id = ? AND chat = ?", instead_of, chat)
                if not found:
                    raise MoestroError(NO_BRANCH)
                parent = found[0]["parent"]
            insert = """INSERT INTO messages (chat, role, text, state, created, asked, parent, leaf_before)
                VALUES (?, ?, ?, ?, ?, ?, ?, ?)"""
            question = None
            if text is not None:
                parent = question = db.execute(insert, (chat, "user", text, "done", now, None, parent, None)).lastrowid
            begun = db.execute(insert, (chat, "assistant", "", "writing", now, question, parent, leaf))
            answer = int(begun.lastrowid or 0)
            db.execute("UPDATE chats SET leaf = ? WHERE id = ?", (answer, chat))
            self.version += 1
            return chat, answer

    def show(self, chat: int, message: int) -> None:
        """Show a message's branch, down to the newest one under it. Raises MoestroError if there is no such message."""
        with self._db.tx() as db:
            self.require(chat)
            newest = self._db.rows(NEWEST, message, chat, chat)[0]["id"]
            if newest is None:
                raise MoestroError(NO_BRANCH)
            db.execute("UPDATE chats SET leaf = ? WHERE id = ?", (newest, chat))

    def rewrite(self, chat: int, answer: int, text: str) -> None:
        """Show `text` next to an answer, as another branch. Raises MoestroError if there is no such answer."""
        with self._db.tx() as db:
            made = db.execute(
                "INSERT INTO messages (chat, role, text, state, created, parent) SELECT chat, role, ?, 'edited', ?, "
                "parent FROM messages WHERE id = ? AND chat = ? AND role = 'assistant'",
                (text, time.time(), answer, chat),
            )
            if not made.rowcount:
                raise MoestroError(NO_BRANCH)
            db.execute("UPDATE chats SET leaf = ? WHERE id = ?", (made.lastrowid, chat))

    def set_system(self, chat: int, system: str) -> None:
        """Set the system prompt of a chat."""
        with self._db.tx() as db:
            self.require(chat)
            db.execute("UPDATE chats SET system = ? WHERE id = ?", (system, chat))

    def append(self, answer: int, seq: int, text: str) -> None:
        """Add a token's text to an answer being written."""
        with self._db.tx() as db:
            db.execute("INSERT INTO pieces VALUES (?, ?, ?)", (answer, seq, text))

    def finish(self, answer: int, state: State, stats: dict[str, Any] | None = None, error: str = "") -> None:
        """Merge the pieces of an answer into its text and set its final state."""
        with self._db.tx() as db:
            db.execute(
                "UPDATE messages SET text = ?, state = ?, stats = ?, error = ? WHERE id = ?",
                (self._written(answer), state, json.dumps(stats) if stats else None, error, answer),
            )
            db.execute("DELETE FROM pieces WHERE message = ?", (answer,))

    def score(self, answer: int, quality: dict[str, Any]) -> None:
        """Store the quality of a finished answer. Does nothing when it has been deleted."""
        with self._db.tx() as db:
            db.execute("UPDATE messages SET quality = ? WHERE id = ?", (json.dumps(quality), answer))

    def undo(self, answer: int) -> None:
        """Restore the chat to its state before `begin`: for an answer that failed before its first token."""
        with self._db.tx() as db:
            chat, question, leaf = db.execute(
                "SELECT chat, asked, leaf_before FROM messages WHERE id = ?", (answer,)
            ).fetchone()
            db.execute("UPDATE chats SET leaf = ? WHERE id = ? AND leaf = ?", (leaf, chat, answer))
            db.execute("DELETE FROM messages WHERE id IN (?, ?)", (answer, question))
            if not self._db.rows("SELECT 1 FROM messages WHERE chat = ?", chat):
                db.execute("DELETE FROM chats WHERE id = ?", (chat,))
            self.version += 1

    def rename(self, chat: int, title: str) -> None:
        """Set a chat's title. Raises MoestroError if the title is empty or the chat does not exist."""
        clean = " ".join(title.split())
        if not clean:
            raise MoestroError("A chat needs a name. Write one, or leave the old one.")
        self.require(chat)
        with self._db.tx() as db:
            db.execute("UPDATE chats SET title = ? WHERE id = ?", (clean[:200], chat))
            self.version += 1

    @property
    def pinned(self) -> list[int]:
        """The chats that are listed before all others."""
        return [one for one in self._db.get(PINNED, list) or [] if isinstance(one, int)]

    def pin(self, chat: int) -> None:
        """Pin a chat, or unpin it where it is pinned. Raises MoestroError if it does not exist."""
        self.require(chat)
        before = self.pinned
        with self._db.tx():
            self._db.put(PINNED, [one for one in before if one != chat] if chat in before else [*before, chat])
            self.version += 1

    def delete(self, chat: int) -> None:
        """Delete a chat with its messages and its statistics. Raises MoestroError if it does not exist."""
        self.require(chat)
        if chat in self.pinned:
            self.pin(chat)
        with self._db.tx() as db:
            db.execute("UPDATE changes SET chat = NULL WHERE chat = ?", (chat,))  # they explain other chats' figures
            db.execute("DELETE FROM chats WHERE id = ?", (chat,))
            self.version += 1

    def _read(self, chat: int, found: list[sqlite3.Row], writing: str | None) -> list[Message]:
        branches: dict[int | None, list[int]] = {}
        for row in self._db.rows("SELECT id, parent FROM messages WHERE chat = ? ORDER BY id", chat):
            branches.setdefault(row["parent"], []).append(row["id"])
        return [
            Message(
                **{
                    **dict(row),
                    **self._figures(row),
                    "branches": tuple(branches[row["parent"]]),
                    "text": row["text"]
                    if row["state"] != "writing"
                    else writing
                    if writing is not None
                    else self._written(row["id"]),
                }
            )
            for row in found
        ]

    def _figures(self, row: sqlite3.Row) -> dict[str, Any]:
        """The statistics and the quality of a message; None where damaged, which is logged once."""
        found: dict[str, Any] = {"stats": None, "quality": None}
        for name, read in (("stats", stats_of), ("quality", quality_of)):
            try:
                found[name] = read(row[name])
            except InvalidRow as error:
                if row["id"] not in self._logged_damaged:
                    self._logged_damaged.add(row["id"])
                    log.warning("figures of message %s are not shown: %s", row["id"], error)
        return found

    def _written(self, answer: int) -> str:
        return "".join(
            row["text"] for row in self._db.rows("SELECT text FROM pieces WHERE message = ? ORDER BY seq", answer)
        )


def _title(text: str) -> str:
    """Of a chat that begins with this text: attached files are named, behind what is asked."""
    asked = " ".join([*ATTACHED.sub(" ", text).split(), *(name for name, _ in ATTACHED.findall(text))]) or "New chat"
    return asked if len(asked) <= TITLE_CHARS else asked[: TITLE_CHARS - 1].rstrip() + "…"
