"""Chats and messages. An answer is begun, extended token by token, and finished; or undone without a trace."""

from __future__ import annotations

import json
import logging
import re
import sqlite3
import time
from dataclasses import dataclass
from typing import Any, Literal

from app.store.database import Database
from app.store.stored import Unfit, quality_of, stats_of
from core.errors import MoestroError

log = logging.getLogger("moestro.store")
State = Literal["writing", "done", "stopped", "error", "interrupted"]
TITLE_CHARS = 60
MOST_WORDS = 20  # of a search


@dataclass(frozen=True, slots=True)
class Chat:
    """One line of the history. `created` and `updated` are seconds since the epoch; `tokens` = decoded tokens."""

    id: int
    title: str
    model: str
    created: float
    updated: float
    messages: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Message:
    """One message as shown. `stats`, for a finished answer: the fields of `core.types.AnswerStats`, and `queued_ms`.
    `quality`, for one scored against the exact model: the fields of `core.quality.report.Quality`. `unsaved`: why its
    text is only in memory.
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


class Chats:
    """All chats of one database."""

    def __init__(self, db: Database) -> None:
        self._db = db
        self._told: set[int] = set()  # messages whose damaged figures have been logged
        for row in db.rows("SELECT id, asked FROM messages WHERE state = 'writing'"):  # left by a crash
            if row["asked"] is None and not self._written(row["id"]):
                self.undo(row["id"])  # a regeneration without any text: the previous answer is restored
            else:
                self.finish(row["id"], "interrupted")

    def all(self) -> list[Chat]:
        """Every chat, most recently changed first."""
        return [
            Chat(**dict(row))
            for row in self._db.rows(
                """SELECT c.id, c.title, c.model, c.created,
                      coalesce((SELECT max(created) FROM messages WHERE chat = c.id), c.created) AS updated,
                      (SELECT count(*) FROM messages WHERE chat = c.id AND replaced_by IS NULL) AS messages,
                      (SELECT count(*) FROM steps WHERE chat = c.id AND phase = 'decode') AS tokens
               FROM chats c ORDER BY updated DESC, c.id DESC"""
            )
        ]

    def with_words(self, text: str) -> set[int]:
        """Ids of the chats that have every word of `text` in their title or in their messages; A to Z are found in
        either case."""
        has = """(c.title LIKE ? ESCAPE '\\' OR EXISTS (SELECT 1 FROM messages m WHERE m.chat = c.id
                  AND m.replaced_by IS NULL AND m.text LIKE ? ESCAPE '\\'))"""
        words = ["%" + re.sub(r"([\\%_])", r"\\\1", word) + "%" for word in text.split()[:MOST_WORDS]]
        where = " AND ".join([has] * len(words)) or "1"
        return {
            row["id"]
            for row in self._db.rows(f"SELECT c.id FROM chats c WHERE {where}", *(w for w in words for _ in range(2)))
        }

    def messages(self, chat: int, writing: str | None = None) -> list[Message]:
        """The messages of a chat, oldest first. Raises MoestroError if there is no such chat.

        `writing` = the text so far of the answer being written, if the caller has it; avoids reading every piece.
        """
        with self._db.tx():  # all queries see one state
            self.require(chat)
            found = self._db.rows(
                "SELECT id, role, text, state, error, stats, created, quality FROM messages "
                "WHERE chat = ? AND replaced_by IS NULL ORDER BY id",
                chat,
            )
            return [
                Message(
                    **{
                        **dict(row),
                        **self._figures(row),
                        "text": row["text"]
                        if row["state"] != "writing"
                        else writing
                        if writing is not None
                        else self._written(row["id"]),
                    }
                )
                for row in found
            ]

    def require(self, chat: int) -> None:
        """Raises MoestroError if there is no such chat."""
        if not self._db.rows("SELECT 1 FROM chats WHERE id = ?", chat):
            raise MoestroError("That chat no longer exists. Pick another one, or start a new chat.")

    def begin(
        self, chat: int | None, text: str | None, model: str, replaces_from: int | None = None
    ) -> tuple[int, int]:
        """Start an answer, after a new user message when `text` is given; returns (chat, answer) ids.

        `chat` None creates a chat titled by `text`. Messages from id `replaces_from` on are removed from the chat in
        the same transaction, and restored if the answer is undone.
        """
        now = time.time()
        with self._db.tx() as db:
            if chat is None:
                title = " ".join((text or "New chat").split())
                title = title if len(title) <= TITLE_CHARS else title[: TITLE_CHARS - 1].rstrip() + "…"
                chat = int(
                    db.execute(
                        "INSERT INTO chats (title, model, created) VALUES (?, ?, ?)", (title, model, now)
                    ).lastrowid
                    or 0
                )
            self.require(chat)
            old = (
                [
                    row["id"]
                    for row in self._db.rows(
                        "SELECT id FROM messages WHERE chat = ? AND replaced_by IS NULL AND id >= ?",
                        chat,
                        replaces_from,
                    )
                ]
                if replaces_from is not None
                else []
            )
            insert = "INSERT INTO messages (chat, role, text, state, created, asked) VALUES (?, ?, ?, ?, ?, ?)"
            asked = None if text is None else db.execute(insert, (chat, "user", text, "done", now, None)).lastrowid
            answer = int(db.execute(insert, (chat, "assistant", "", "writing", now, asked)).lastrowid or 0)
            db.executemany("UPDATE messages SET replaced_by = ? WHERE id = ?", [(answer, one) for one in old])
            return chat, answer

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
        """Store the quality of a finished answer. Does nothing when it was deleted meanwhile."""
        with self._db.tx() as db:
            db.execute("UPDATE messages SET quality = ? WHERE id = ?", (json.dumps(quality), answer))

    def undo(self, answer: int) -> None:
        """Restore the chat to its state before `begin`: for an answer that failed before its first token."""
        with self._db.tx() as db:
            chat, asked = db.execute("SELECT chat, asked FROM messages WHERE id = ?", (answer,)).fetchone()
            db.execute("UPDATE messages SET replaced_by = NULL WHERE replaced_by = ?", (answer,))
            db.execute("DELETE FROM messages WHERE id IN (?, ?)", (answer, asked))
            if not self._db.rows("SELECT 1 FROM messages WHERE chat = ?", chat):
                db.execute("DELETE FROM chats WHERE id = ?", (chat,))

    def rename(self, chat: int, title: str) -> None:
        """Set a chat's title. Raises MoestroError if the title is empty or the chat does not exist."""
        clean = " ".join(title.split())
        if not clean:
            raise MoestroError("A chat needs a name. Write one, or leave the old one.")
        self.require(chat)
        with self._db.tx() as db:
            db.execute("UPDATE chats SET title = ? WHERE id = ?", (clean[:200], chat))

    def delete(self, chat: int) -> None:
        """Delete a chat with its messages and its statistics. Raises MoestroError if it does not exist."""
        self.require(chat)
        with self._db.tx() as db:
            db.execute("UPDATE changes SET chat = NULL WHERE chat = ?", (chat,))  # they explain other chats' figures
            db.execute("DELETE FROM chats WHERE id = ?", (chat,))

    def _figures(self, row: sqlite3.Row) -> dict[str, Any]:
        """The statistics and the quality of a message; None where damaged, which is logged once."""
        found: dict[str, Any] = {"stats": None, "quality": None}
        for name, read in (("stats", stats_of), ("quality", quality_of)):
            try:
                found[name] = read(row[name])
            except Unfit as error:
                if row["id"] not in self._told:
                    self._told.add(row["id"])
                    log.warning("figures of message %s are not shown: %s", row["id"], error)
        return found

    def _written(self, answer: int) -> str:
        return "".join(
            row["text"] for row in self._db.rows("SELECT text FROM pieces WHERE message = ? ORDER BY seq", answer)
        )
