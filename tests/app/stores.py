"""Stores on disk for the tests of damage and of copies."""

import sqlite3
from contextlib import closing
from pathlib import Path

from app.store import Store
from app.store.check import NAME
from tests.app.records import a_step, load_of


def filled(folder: Path, words: str = "one ") -> Path:
    store = Store(folder)
    load = load_of(store)
    chat, answer = store.chats.begin(None, "hello", "demo")
    for seq in range(40):
        store.token(load, chat, answer, seq, words, a_step(seq), {})
    store.chats.finish(answer, "done")
    store.close()
    return folder / NAME


def changed(path: Path, *statements: str) -> None:
    """Run SQL on a database that nothing else has open."""
    with closing(sqlite3.connect(path)) as db:
        for statement in statements:
            db.execute(statement)
        db.commit()


def spoil(path: Path, page: int = 3) -> bytes:
    """Overwrite a page with what no page holds; returns the file as it then is."""
    with path.open("r+b") as file:
        file.seek((page - 1) * 4096)
        file.write(b"\xa5" * 4096)
    return path.read_bytes()


def said(folder: Path) -> str:
    with closing(Store(folder)) as store:
        return "".join(m.text for chat in store.chats.all() for m in store.chats.messages(chat.id))
