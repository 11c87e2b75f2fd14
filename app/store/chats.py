"""Chats and messages. An answer is begun, extended token by token, and finished; or undone without a trace.

A chat is a tree: a message follows its `parent`, and an edit or a regeneration is another child of the same parent.
What is shown and sent to the model is the path from the first message to the chat's `leaf`. A parent is older than its
children."""

import json
import logging
import re
import sqlite3
import time
from collections.abc import Mapping
from typing import Any

from app.store.chat_rows import (
    EVERY,
    LINE,
    NEWEST,
    SHOWN,
    SUMS,
    Chat,
    Message,
    State,
    Unfinished,
    blob_of,
    ids_of,
    settings_of,
)
from app.store.database import Database
from app.store.row_checks import InvalidRow, quality_of, stats_of
from core.errors import MoestroError

log = logging.getLogger("moestro.store")
TITLE_CHARS = 60
ATTACHED = re.compile(r"(?:^|\n)File ([^\n]+):\n(`{3,})\n.*?\n\2(?=\n|$)", re.DOTALL)  # assets/ui/chat/attach.js
PINNED = "pinned_chats"  # store key
GONE = "That chat no longer exists. Pick another one, or start a new chat."
NO_BRANCH = "That branch no longer exists. Reload the page."
NO_SEQUEL = "Only the last answer that is shown can be continued. Reload the page."


class Chats:
    """All chats of one database. `version` changes whenever the list of chats does."""

    def __init__(self, db: Database) -> None:
        self._db = db
        self.version = int(time.time() * 1000)  # differs after a restart, too
        self._logged_damaged: set[int] = set()  # messages whose damaged figures have been logged
        left = "SELECT id, asked IS NULL OR state_before NOT NULL AS again FROM messages WHERE state = 'writing'"
        for row in db.rows(left):  # by a crash
            if row["again"] and not self._pieces(row["id"]):
                self.undo(row["id"])  # without any text of its own: the answer before it is restored
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

        `writing` = the text so far of the answer being written, if the caller has it; avoids reading every piece."""
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
        undone."""
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

    def go_on(self, chat: int, answer: int) -> Unfinished:
        """Start to continue the last answer shown, which is as it was if that is undone. Raises MoestroError if it is
        not the last one."""
        with self._db.tx() as db:
            self.require(chat)
            begun = db.execute(
                "UPDATE messages SET state_before = state, state = 'writing' WHERE id = ? AND role = 'assistant' "
                "AND state != 'writing' AND id = (SELECT leaf FROM chats WHERE id = ?)",
                (answer, chat),
            )
            if not begun.rowcount:
                raise MoestroError(NO_SEQUEL)
            [row] = self._db.rows("SELECT text, tokens, sampling FROM messages WHERE id = ?", answer)
            return Unfinished(str(row["text"]), ids_of(row["tokens"]), settings_of(row["sampling"]))

    def keep_sampling(self, answer: int, sampling: Mapping[str, Any]) -> None:
        """Note the settings that an answer is begun with."""
        with self._db.tx() as db:
            db.execute("UPDATE messages SET sampling = ? WHERE id = ?", (json.dumps(dict(sampling)), answer))

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

    def append(self, answer: int, seq: int, text: str, token: int | None = None) -> None:
        """Add a token's text to an answer being written; `token` = its id."""
        with self._db.tx() as db:
            db.execute("INSERT INTO pieces VALUES (?, ?, ?, ?)", (answer, seq, text, token))

    def finish(self, answer: int, state: State, stats: dict[str, Any] | None = None, error: str = "") -> None:
        """Merge the pieces of an answer into its text and set its final state."""
        with self._db.tx() as db:
            pieces, sql = self._pieces(answer), "SELECT text, tokens, state_before FROM messages WHERE id = ?"
            for row in self._db.rows(sql, answer):
                before = ids_of(row["tokens"]) if row["state_before"] is not None else ()
                tokens = None if before is None else blob_of([*before, *(one["token"] for one in pieces)])
                text = row["text"] + "".join(one["text"] for one in pieces)
                db.execute(
                    "UPDATE messages SET text = ?, tokens = ?, state = ?, stats = ?, error = ?, state_before = NULL, "
                    "quality = NULL WHERE id = ?",
                    (text, tokens, state, json.dumps(stats) if stats else None, error, answer),
                )
            db.execute("DELETE FROM pieces WHERE message = ?", (answer,))

    def score(self, answer: int, quality: dict[str, Any]) -> None:
        """Store the quality of a finished answer. Does nothing when it has been deleted."""
        with self._db.tx() as db:
            db.execute("UPDATE messages SET quality = ? WHERE id = ?", (json.dumps(quality), answer))

    def undo(self, answer: int) -> None:
        """Restore the chat to its state before `begin` or `go_on`: for an answer that failed before its first token."""
        with self._db.tx() as db:
            if db.execute(
                "UPDATE messages SET state = state_before, state_before = NULL WHERE id = ? AND state_before NOT NULL",
                (answer,),
            ).rowcount:
                return
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
                    else row["text"] + "".join(one["text"] for one in self._pieces(row["id"])),
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

    def _pieces(self, answer: int) -> list[sqlite3.Row]:
        return self._db.rows("SELECT text, token FROM pieces WHERE message = ? ORDER BY seq", answer)


def _title(text: str) -> str:
    """Of a chat that begins with this text: attached files are named, behind what is asked."""
    asked = " ".join([*ATTACHED.sub(" ", text).split(), *(name for name, _ in ATTACHED.findall(text))]) or "New chat"
    return asked if len(asked) <= TITLE_CHARS else asked[: TITLE_CHARS - 1].rstrip() + "…"
