"""Search over the titles and the texts of all chats, their other branches included."""

import re
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass

from app.store.database import Database

MOST_WORDS = 16  # of a query; the others are ignored
AROUND = 40  # characters of an excerpt on each side of the word that was found


@dataclass(frozen=True, slots=True)
class Found:
    """A chat that was found. `message` and `excerpt`: the newest message with the words, None and "" where the title
    has them."""

    chat: int
    message: int | None = None
    excerpt: str = ""


def search_chats(db: Database, query: str, most: int = 200) -> list[Found]:
    """At most `most` chats whose title, or one of whose messages, has all words of the query (in any order, as parts of
    words too, in any case), the most recently changed first; [] for a query without words. Text of an answer that is
    being written is not looked at. Raises StoreError."""
    words = [re.compile(re.escape(word), re.IGNORECASE) for word in query.split()[:MOST_WORDS]]
    if not words:
        return []
    with db.reader() as reader:
        return list(_search(reader, words, most))


def _search(db: sqlite3.Connection, words: list[re.Pattern[str]], most: int) -> Iterator[Found]:
    chats = db.execute(
        """SELECT id, title FROM chats c
        ORDER BY coalesce((SELECT max(created) FROM messages WHERE chat = c.id), c.created) DESC, id DESC"""
    ).fetchall()
    for chat, title in chats:
        if most <= 0:
            return
        found = Found(chat) if _has(title, words) else None
        for message, text in (
            () if found else db.execute("SELECT id, text FROM messages WHERE chat = ? ORDER BY id DESC", (chat,))
        ):
            if _has(text, words):
                found = Found(chat, message, excerpt(text, words[0]))
                break
        if found is not None:
            most -= 1
            yield found


def _has(text: object, words: list[re.Pattern[str]]) -> bool:
    return isinstance(text, str) and all(word.search(text) for word in words)


def excerpt(text: str, word: re.Pattern[str]) -> str:
    """One line of the text around the first occurrence of a word."""
    match = word.search(text)
    start, end = match.span() if match else (0, 0)
    first, last = max(0, start - AROUND), min(len(text), end + AROUND)
    cut = " ".join(text[first:last].split())
    return f"{'…' if first else ''}{cut}{'…' if last < len(text) else ''}"
