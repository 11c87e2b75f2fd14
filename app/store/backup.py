"""Backups of the database: made periodically in the background, checked, the last two kept; and their restoration."""

import logging
import os
import shutil
import sqlite3
import threading
import time
from contextlib import closing
from pathlib import Path

from app.store.check import LOGS, NAME, backups, find_damage
from app.store.database import Database, lock_folder
from app.store.private import private_folder, touch_private
from app.store.schema import MIGRATIONS, StoreError
from core.system.command import COMMAND

log = logging.getLogger("moestro.store")
KEPT = 2
EVERY_S = 24 * 3600.0  # maximum age before a new copy is made
EVERY_ANSWERS = 50  # answers after which a new copy is made
PAGES = 1024  # copied at a time
SPARE = 64 << 20  # bytes that stay free on the disk after a copy


class Backups:
    """Makes copies of an open database when due. `now` = seconds since the epoch."""

    def __init__(self, db: Database) -> None:
        self._db = db
        self._answers = 0
        self._stop, self._lock = threading.Event(), threading.Lock()
        self._thread: threading.Thread | None = None

    def answered(self, now: float | None = None) -> None:
        """Called after an answer was saved: starts a copy if one is due."""
        with self._lock:
            self._answers += 1
            if self._thread is not None and self._thread.is_alive():
                return
            if not self._is_due(time.time() if now is None else now):
                return
            self._answers = 0
            self._thread = threading.Thread(target=self._run, name="moestro-backup", daemon=True)
            self._thread.start()

    def make(self) -> Path:
        """Make a copy now; returns its path. Raises StoreError, also when there is no room or the database is
        damaged."""
        folder, source = self._db.path.parent, self._db.path
        size, room = source.stat().st_size, shutil.disk_usage(folder).free
        if room < size + SPARE:
            raise StoreError(
                f"There is no room for a copy of the chats: it takes {size:,} bytes, and the disk has "
                f"{room:,} left. Free some space."
            )
        into = private_folder(folder / "backups")
        part = into / "moestro.part"
        try:
            part.unlink(missing_ok=True)
            touch_private(part)
            with self._db.reader() as db, closing(sqlite3.connect(part)) as copy:
                db.backup(copy, pages=PAGES, progress=self._go_on)
                copy.execute("PRAGMA journal_mode=DELETE")  # a single file, whatever mode the original uses
            if damage := find_damage(part, self._stop):
                raise StoreError(
                    f"The copy of the chats is damaged, and so may they be: {damage}. The older copies "
                    f"are kept; run `{COMMAND} data --check` when Moestro has ended."
                )
            _flush(part)
            made = _free_name(into, "moestro-{}.sqlite3")
            part.replace(made)
        except OSError as error:
            raise StoreError(f"The chats could not be copied to {into}: {error.strerror or error}.") from error
        finally:
            part.unlink(missing_ok=True)
        for old in backups(folder)[KEPT:]:
            old.unlink(missing_ok=True)
        return made

    def wait(self) -> None:
        """Wait for the running copy."""
        if self._thread is not None:
            self._thread.join()

    def close(self) -> None:
        """Abort the running copy."""
        self._stop.set()
        self.wait()

    def _go_on(self, status: int, remaining: int, total: int) -> None:
        if self._stop.is_set():
            raise InterruptedError

    def _is_due(self, now: float) -> bool:
        if self._answers >= EVERY_ANSWERS:
            return True
        last = [copy.stat().st_mtime for copy in backups(self._db.path.parent)[:1]]
        if not last:
            last = [row["created"] for row in self._db.rows("SELECT min(created) AS created FROM chats")]
        return last[0] is not None and now - last[0] > EVERY_S

    def _run(self) -> None:
        try:
            self.make()
        except InterruptedError:
            pass  # the program is ending
        except Exception as error:
            if not self._stop.is_set():
                log.warning("no copy of the chats was made: %s", error)


def move_aside(folder: Path) -> Path | None:
    """Rename the database and its log, so that the next start creates a new one; returns the new name, or None without
    a database. Deletes nothing. Raises BusyError while Moestro runs, StoreError when it cannot be done."""
    with closing(lock_folder(folder)):
        return _move_aside(folder)


def restore(folder: Path) -> tuple[Path, Path | None]:
    """Replace the database by the newest intact copy; returns the copy, and the new path of the old database.

    Raises BusyError while Moestro runs, and StoreError, with nothing changed, when there is no intact copy."""
    with closing(lock_folder(folder)):
        whole = next((copy for copy in backups(folder) if _usable(copy)), None)
        if whole is None:
            raise StoreError(
                f"There is no whole copy of the chats in {folder / 'backups'}. Use --move-aside to start "
                "afresh; nothing was changed."
            )
        fresh = folder / f"{NAME}.new"
        try:
            touch_private(fresh)
            shutil.copyfile(whole, fresh)
            _flush(fresh)
            aside = _move_aside(folder)
            fresh.replace(folder / NAME)
        except OSError as error:
            fresh.unlink(missing_ok=True)
            raise StoreError(f"The copy could not be put back: {error.strerror or error}.") from error
        return whole, aside


def _usable(copy: Path) -> bool:
    """Whether a copy is intact and of a version that this program can read."""
    try:
        with closing(sqlite3.connect(copy.resolve().as_uri() + "?mode=ro", uri=True)) as db:
            version = int(db.execute("PRAGMA user_version").fetchone()[0])
        return 0 < version <= len(MIGRATIONS) and not find_damage(copy)
    except (sqlite3.Error, UnicodeDecodeError):
        return False


def _move_aside(folder: Path) -> Path | None:
    base = folder / NAME
    if not any(os.path.lexists(f"{base}{end}") for end in ("", *LOGS)):
        return None
    aside = _free_name(folder, "moestro-damaged-{}.sqlite3")
    try:
        for end in (*LOGS, "-shm", ""):  # the database last, so that a retry after a failure still finds it
            if os.path.lexists(part := base.with_name(base.name + end)):
                part.replace(aside.with_name(aside.name + end))
    except OSError as error:
        raise StoreError(f"{base} could not be renamed: {error.strerror or error}. Check its permissions.") from error
    return aside


def _free_name(folder: Path, pattern: str) -> Path:
    """An unused name with a timestamp; names sort by time."""
    while True:
        now = time.time_ns()
        micros = now // 1000 % 10**6
        name = folder / pattern.format(f"{time.strftime('%Y%m%d-%H%M%S', time.localtime(now // 10**9))}-{micros:06}")
        if not name.exists():
            return name


def _flush(file: Path) -> None:
    """Flush the file to disk."""
    with file.open("rb+") as handle:
        os.fsync(handle.fileno())
