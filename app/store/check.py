"""Is the database whole? Asked before anything is written to it, while the rest of the program is being imported."""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from contextlib import closing
from pathlib import Path

from app.store.schema import DamagedError, StoreError

NAME = "moestro.sqlite3"
LOGS = ("-wal", "-journal")  # what SQLite keeps beside it of commits that are not in it yet
HEADER_BYTES = 100  # with less no file is a database; one of ours never has less, see `database.create`
MOST_S = 10.0  # that a start waits for the check; a larger file is checked on while it is used
INSTRUCTIONS = 100_000  # of SQLite between two looks at the clock


class Check:
    """A check that runs in a thread of its own from the beginning on."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.damage = ""  # what SQLite found, once `ended`
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="moestro-check", daemon=True)
        self._thread.start()

    def wait(self, seconds: float = MOST_S) -> bool:
        """Wait for its end, at most so long; returns whether it has ended. Raises DamagedError."""
        self._thread.join(seconds)
        self.require_whole()
        return not self._thread.is_alive()

    def require_whole(self) -> None:
        """Raises DamagedError if damage has been found so far."""
        if self.damage:
            raise DamagedError(damaged(self.path, self.damage))

    def stop(self) -> None:
        """End it, finished or not."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        self.damage = find_damage(self.path, self._stop)


def find_damage(path: Path, stop: threading.Event | None = None) -> str:
    """What is wrong with a database, or "": of a whole file, none, or one that cannot be read just now."""
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
        return said(error) if is_damage(error) else ""


def is_damage(error: Exception) -> bool:
    """Does an error of SQLite's mean that the file is not what it should be?"""
    return isinstance(error, UnicodeDecodeError) or getattr(error, "sqlite_errorcode", 0) & 0xFF in (
        sqlite3.SQLITE_CORRUPT,
        sqlite3.SQLITE_NOTADB,
    )


def said(error: Exception) -> str:
    """What SQLite said. Where it quotes bytes of the file that are no text, Python raises in place of its error."""
    return "a name in it is no text" if isinstance(error, UnicodeDecodeError) else str(error)


def damaged(path: Path, how: str) -> str:
    """What to say of a damaged database, and what to do."""
    saved = backups(path.parent)
    back = (
        f"`python launch.py data --restore` brings back the copy of {_when(saved[0])}, and "
        if saved
        else "There is no copy of it to go back to. "
    )
    return (
        f"The chats and figures in {path} are damaged ({how.splitlines()[0] if how else 'unreadable'}). Nothing "
        f"was changed. {back}`python launch.py data --move-aside` starts afresh. Either keeps the damaged file "
        "under another name; end Moestro before."
    )


def backups(folder: Path) -> list[Path]:
    """Finished copies of a data folder's database, newest first."""
    return sorted((folder / "backups").glob("moestro-[0-9]*.sqlite3"), reverse=True)


def _when(copy: Path) -> str:
    return f"{time.strftime('%d %B %Y, %H:%M', time.localtime(copy.stat().st_mtime))}"


def require_ours(db: sqlite3.Connection, path: Path) -> None:
    """Raises StoreError when a database is another program's, before anything is made in it."""
    version = db.execute("PRAGMA user_version").fetchone()[0]
    tables = [row[0] for row in db.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")]
    if version == 0 and tables:
        raise StoreError(
            f"{path} is another program's database: it has the table {tables[0]!r}. Move it away, or set "
            "MOESTRO_HOME to another folder."
        )
