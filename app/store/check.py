"""Checks the database for damage before anything is written, while the rest of the program is imported."""

import os
import sqlite3
import threading
import time
from contextlib import closing
from pathlib import Path

from app.store.schema import DamagedError, StoreError
from core.system.command import COMMAND

NAME = "moestro.sqlite3"
LOGS = ("-wal", "-journal")  # SQLite's files next to the database that hold commits not yet in it
HEADER_BYTES = 100  # smaller files are no database; ours is never smaller, see `database.create`
MOST_S = 10.0  # longest wait at start; a larger file is checked further during use
INSTRUCTIONS = 100_000  # SQLite instructions between two checks of the clock


class Check:
    """A check running in its own thread from its creation on."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.damage = ""  # SQLite's finding, valid once `ended`
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="moestro-check", daemon=True)
        self._thread.start()

    def wait(self, seconds: float = MOST_S) -> bool:
        """Wait for the end, at most `seconds`; returns whether it has ended. Raises DamagedError."""
        self._thread.join(seconds)
        self.require_whole()
        return not self._thread.is_alive()

    def require_whole(self) -> None:
        """Raises DamagedError if damage has been found so far."""
        if self.damage:
            raise DamagedError(damaged(self.path, self.damage))

    def stop(self) -> None:
        """Stop the check."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        self.damage = find_damage(self.path, self._stop)


def find_damage(path: Path, stop: threading.Event | None = None) -> str:
    """The damage of a database, or "" if it is intact, missing, or cannot be read at the moment."""
    try:
        if not os.path.lexists(path):
            lost = next((end for end in LOGS if os.path.lexists(f"{path}{end}")), "")
            return f"it is gone, and its {path.name}{lost} is still there" if lost else ""
        if not path.is_file():
            return ""
        if (size := path.stat().st_size) < HEADER_BYTES:
            return f"it has been cut to {size} bytes" if size != 1 else "it has been cut to one byte"
    except OSError:
        return ""
    try:
        with closing(sqlite3.connect(path.resolve().as_uri() + "?mode=ro", uri=True, timeout=10.0)) as db:
            if stop is not None:
                db.set_progress_handler(stop.is_set, INSTRUCTIONS)
            found = str(db.execute("PRAGMA quick_check(1)").fetchone()[0])
            return "" if found == "ok" else found.removeprefix("*** in database main ***").strip()
    except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
        return error_text(error) if is_damage(error) else ""


def is_damage(error: Exception) -> bool:
    """Whether an SQLite error means that the file is damaged."""
    return isinstance(error, UnicodeDecodeError) or getattr(error, "sqlite_errorcode", 0) & 0xFF in (
        sqlite3.SQLITE_CORRUPT,
        sqlite3.SQLITE_NOTADB,
    )


def error_text(error: Exception) -> str:
    """SQLite's message. Where it quotes file bytes that are not text, Python raises a different error."""
    return "a name in it is no text" if isinstance(error, UnicodeDecodeError) else str(error)


def damaged(path: Path, how: str) -> str:
    """The error message for a damaged database, with instructions."""
    saved = backups(path.parent)
    back = (
        f"`{COMMAND} data --restore` brings back the copy of {_when(saved[0])}, and "
        if saved
        else "There is no copy of it to go back to. "
    )
    return (
        f"The chats and figures in {path} are damaged ({how.splitlines()[0] if how else 'unreadable'}). Nothing "
        f"was changed. {back}`{COMMAND} data --move-aside` starts afresh. Either keeps the damaged file "
        "under another name; end Moestro before."
    )


def backups(folder: Path) -> list[Path]:
    """Finished copies of a data folder's database, newest first."""
    return sorted((folder / "backups").glob("moestro-[0-9]*.sqlite3"), reverse=True)


def _when(copy: Path) -> str:
    return f"{time.strftime('%d %B %Y, %H:%M', time.localtime(copy.stat().st_mtime))}"


def require_ours(db: sqlite3.Connection, path: Path) -> None:
    """Raises StoreError when a database belongs to another program, before anything is created in it."""
    version = db.execute("PRAGMA user_version").fetchone()[0]
    tables = [row[0] for row in db.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")]
    if version == 0 and tables:
        raise StoreError(
            f"{path} is another program's database: it has the table {tables[0]!r}. Move it away, or set "
            "MOESTRO_HOME to another folder."
        )
