"""What Moestro remembers between starts: chats, statistics, the last model and settings. One SQLite file a user."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from app.store.chats import Chat, Chats, Message
from app.store.database import Database
from app.store.home import data_dir
from app.store.schema import StoreError
from app.store.steps import Load, Steps
from app.store.traces import StoredTrace, stored_traces
from core.types import StepRecord

__all__ = ["Chat", "Load", "Message", "Store", "StoreError", "StoredTrace", "data_dir"]


class Store:
    """The open store. Raises StoreError, or BusyError while another process has it open."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or data_dir()
        self.db = Database(self.folder)
        try:
            self.chats = Chats(self.db)
            self.steps = Steps(self.db)
        except BaseException:
            self.db.close()
            raise

    def token(self, load: int, chat: int | None, answer: int | None, seq: int, text: str, step: StepRecord | None,
              old: dict[str, Any]) -> None:
        """Commit one forward pass: the text it added and its record, both or neither."""
        with self.db.tx():
            if text and answer is not None:
                self.chats.append(answer, seq, text)
            if step is not None:
                self.steps.add(load, chat, answer, step, old)

    def traces(self, chat: int | None, load: int | None = None) -> list[StoredTrace]:
        """The routing recorded in a chat, one trace a model in the order of use; or without a chat, under a load."""
        if chat is not None:
            ids = [row["load"] for row in self.db.rows("SELECT DISTINCT load FROM steps WHERE chat = ?", chat)]
        else:
            ids = [] if load is None else [load]
        return stored_traces(self.db, self.steps.loads(ids), chat)

    def close(self) -> None:
        """Flush and let go of the files."""
        self.db.close()
