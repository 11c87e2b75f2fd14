"""Persistent data: chats, statistics, the last model and settings. One SQLite file per user."""

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from app.store.backup import Backups
from app.store.chat_rows import Chat, Message
from app.store.chats import Chats
from app.store.check import Check
from app.store.database import Database
from app.store.home import data_dir
from app.store.schema import DamagedError, FullError, StoreError
from app.store.search import Found, search_chats
from app.store.steps import Load, Steps
from app.store.traces import StoredTrace, stored_traces
from core.types import StepRecord

__all__ = [
    "Chat",
    "DamagedError",
    "Found",
    "FullError",
    "Load",
    "Message",
    "Store",
    "StoreError",
    "StoredTrace",
    "data_dir",
]
log = logging.getLogger("moestro.store")
RESERVE = 32 << 20  # free bytes of the disk that are reserved for text
ASK_EVERY = 32  # passes between two checks of the free space


def free_bytes(folder: Path) -> int:
    """Free bytes on a folder's disk; effectively unlimited where the system does not report it."""
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return RESERVE


class Store:
    """The open store. Raises StoreError, or BusyError while another process has it open. `check`: a check of its
    database that was started earlier."""

    def __init__(
        self, folder: Path | None = None, free: Callable[[Path], int] = free_bytes, check: Check | None = None
    ) -> None:
        self.folder = folder or data_dir()
        self._free, self._passes, self._recording = free, 0, True
        self.db = Database(self.folder, check)
        try:
            self.chats = Chats(self.db)
            self.steps = Steps(self.db)
            self.backups = Backups(self.db)
        except BaseException:
            self.db.close()
            raise

    def token(
        self,
        load: int,
        chat: int | None,
        answer: int | None,
        seq: int,
        text: str,
        step: StepRecord | None,
        old: dict[str, Any],
        token: int | None = None,
    ) -> bool:
        """Commit one forward pass, its text and its record together; returns whether the record `step` was kept.
        `token` = the id of the token that has this text.

        The record is dropped when the disk has no room for both, or less than RESERVE is free, so that text can still
        be saved. Raises FullError when there is no room for the text either."""
        if step is None or not self._has_room():
            self._words(answer, seq, text, token)
            return step is None
        try:
            with self.db.tx():
                self._words(answer, seq, text, token)
                self.steps.add(load, chat, answer, step, old)
            return True
        except FullError as error:
            if self._recording:
                log.warning("a pass is not recorded: %s", error)
            self._recording = False
        self._words(answer, seq, text, token)
        return False

    def _words(self, answer: int | None, seq: int, text: str, token: int | None) -> None:
        if (text or token is not None) and answer is not None:
            self.chats.append(answer, seq, text, token)

    def _has_room(self) -> bool:
        """Whether more than the reserve is free; asks the system every ASK_EVERY passes."""
        if self._passes % ASK_EVERY == 0:
            had, self._recording = self._recording, self._free(self.folder) >= RESERVE
            if had and not self._recording:
                log.warning("the disk of %s is nearly full: passes are not recorded until it has room", self.folder)
        self._passes += 1
        return self._recording

    def search_chats(self, query: str, most: int = 200) -> list[Found]:
        """The chats whose title or one of whose messages has all words of the query; see `app.store.search`."""
        return search_chats(self.db, query, most)

    def traces(self, chat: int | None, load: int | None = None) -> list[StoredTrace]:
        """The routing recorded in a chat, one trace per model in order of use; without a chat, under a load."""
        return stored_traces(self.db, self.steps.loads(self._loads_of(chat, load)), chat)

    def has_damaged_loads(self, chat: int | None, load: int | None = None) -> bool:
        """Whether `traces` omits routing because its load record is damaged."""
        ids = set(self._loads_of(chat, load))
        there = ids & {row["id"] for row in self.db.rows("SELECT id FROM loads")}
        return len(self.steps.loads(there)) < len(there)

    def _loads_of(self, chat: int | None, load: int | None) -> list[int]:
        if chat is not None:
            return [row["load"] for row in self.db.rows("SELECT DISTINCT load FROM steps WHERE chat = ?", chat)]
        return [] if load is None else [load]

    def close(self) -> None:
        """Flush and close the files."""
        self.backups.close()
        self.db.close()
