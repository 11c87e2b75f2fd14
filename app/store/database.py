"""One SQLite file, one writing connection behind a lock, and short-lived readers that never block the writer."""

import json
import logging
import os
import shutil
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from app.store.check import NAME, Check, damaged, error_text, is_damage, require_ours
from app.store.private import data_folder, tighten, touch_private
from app.store.schema import DamagedError, FullError, StoreError, add_metrics, migrate, wrong_tables
from core.errors import BusyError
from core.system.reading import BadJson, parse_json, reason

UNFIT = (sqlite3.Error, OverflowError, UnicodeError)  # the latter two: values that SQLite cannot store or return
CHECKPOINT_PAGES = 16384  # 64 MB of log: `checkpoint` runs between answers, so tokens do not wait for it

Kept = TypeVar("Kept", bound="dict[str, Any] | list[Any] | str")
log = logging.getLogger("moestro.store")
NO_ROOM = 1 << 20  # free bytes below which a disk counts as full


class Database:
    """Opens (or creates) `moestro.sqlite3` in a folder. One process at a time: a second one gets BusyError.

    WAL with synchronous=NORMAL: a commit survives the death of the process; the death of the machine may cost the last
    commits but never damages the file. Raises StoreError when the folder or the file cannot be used, and DamagedError,
    with nothing changed, when SQLite finds the file damaged. `check`: one started earlier; None starts one here."""

    def __init__(self, folder: Path, check: Check | None = None) -> None:
        self.path = folder / NAME
        self._lock = threading.RLock()
        self._depth = 0
        self._closed = False
        data_folder(folder)
        try:
            self._guard = lock_folder(folder)
            try:
                tighten(folder)
                self._check = check if check is not None and check.path == self.path else Check(self.path)
                self._check.wait()
                self._db = _connect(self.path)
            except BaseException:
                self._guard.close()
                raise
        except (OSError, *UNFIT) as error:
            raise _plain(error, f"open {self.path}", self.path) from error

    @contextmanager
    def tx(self) -> Iterator[sqlite3.Connection]:
        """A transaction: all or nothing. Nested calls join the outer one. Raises StoreError."""
        with self._lock:
            try:
                if self._depth == 0:
                    self._check.require_whole()
                    self._db.execute("BEGIN IMMEDIATE")
                self._depth += 1
                try:
                    yield self._db
                finally:
                    self._depth -= 1
                if self._depth == 0:
                    self._db.execute("COMMIT")
            except BaseException as error:
                if self._depth == 0 and not self._closed and self._db.in_transaction:
                    with suppress(sqlite3.Error):  # SQLite often rolled back already; the first error is reported
                        self._db.execute("ROLLBACK")
                if isinstance(error, UNFIT):
                    raise _plain(error, "save", self.path) from error
                raise

    def rows(self, sql: str, *values: object) -> list[sqlite3.Row]:
        """All rows of a small query. Raises StoreError."""
        with self._lock:
            try:
                return list(self._db.execute(sql, values))
            except UNFIT as error:
                raise _plain(error, "read the chats", self.path) from error

    @contextmanager
    def reader(self) -> Iterator[sqlite3.Connection]:
        """A separate connection for a long read: sees one consistent state, blocks no other connection."""
        try:
            with closing(
                sqlite3.connect(self.path.resolve().as_uri() + "?mode=ro", uri=True, isolation_level=None)
            ) as db:
                db.row_factory = sqlite3.Row
                db.execute("BEGIN")
                db.execute("SELECT 1 FROM sqlite_schema").fetchone()  # fixes the snapshot at this moment
                yield db
        except (sqlite3.Error, UnicodeDecodeError) as error:
            raise _plain(error, "read what was recorded", self.path) from error

    def get(self, key: str, kind: type[Kept] = dict) -> Kept | None:  # type: ignore[assignment]
        """The last value `put` under this key, or None, also when its type is not `kind`."""
        found = self.rows("SELECT value FROM memory WHERE key = ?", key)
        try:
            kept = parse_json(found[0]["value"], nonfinite=True) if found else None
        except (BadJson, TypeError) as error:
            log.warning("forgot %r, which is damaged: %s", key, error)
            return None
        if kept is not None and not isinstance(kept, kind):
            log.warning("forgot %r: it is a %s where a %s should stand", key, type(kept).__name__, kind.__name__)
            return None
        return kept

    def put(self, key: str, value: object) -> None:
        """Store a JSON value across starts."""
        with self.tx() as db:
            db.execute("INSERT OR REPLACE INTO memory VALUES (?, ?)", (key, json.dumps(value)))

    def checkpoint(self) -> None:
        """Checkpoint the log into the file while no token is being written."""
        self.rows("PRAGMA wal_checkpoint(PASSIVE)")

    def close(self) -> None:
        """Flush and close the files. A second call does nothing."""
        with self._lock:
            self._closed = True
            self._check.stop()
            self._db.close()
            self._guard.close()


def _connect(path: Path) -> sqlite3.Connection:
    if not os.path.lexists(path):
        create(path)
    touch_private(path)  # reports why it cannot be opened, which SQLite does not
    db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=10.0)
    try:
        db.row_factory = sqlite3.Row
        require_ours(db, path)
        for pragma in (
            "journal_mode=WAL",
            "synchronous=NORMAL",
            "foreign_keys=ON",
            f"wal_autocheckpoint={CHECKPOINT_PAGES}",
            "journal_size_limit=67108864",
        ):
            db.execute(f"PRAGMA {pragma}")
        migrate(db)
        if wrong := wrong_tables(db):
            raise DamagedError(damaged(path, wrong))
        add_metrics(db)
    except BaseException:
        db.close()
        raise
    return db


def create(path: Path) -> None:
    """Create an empty database under a temporary name first, so that a file without a header is known to be
    truncated."""
    fresh = path.with_name(f"{path.name}.new")
    fresh.unlink(missing_ok=True)
    touch_private(fresh)  # SQLite gives its log and its index the same permissions
    with closing(sqlite3.connect(fresh, isolation_level=None)) as db:
        db.execute("PRAGMA journal_mode=WAL")  # writes the header; closing leaves a single file
    fresh.replace(path)


def lock_folder(folder: Path) -> sqlite3.Connection:
    """Lock the folder for this process: SQLite's file lock works on every system and is released when its owner dies.

    Raises BusyError, or StoreError when that fails."""
    file = folder / "in-use.sqlite3"
    try:
        touch_private(file)
        return _hold(file)
    except (OSError, sqlite3.Error) as error:
        if is_damage(error):
            raise StoreError(f"{file} is damaged. Nothing is stored in it: delete it, then try again.") from error
        raise _plain(error, f"open {file}", file) from error


def _hold(file: Path) -> sqlite3.Connection:
    guard = sqlite3.connect(file, isolation_level=None, check_same_thread=False, timeout=0.2)
    try:
        guard.execute("BEGIN EXCLUSIVE")
    except sqlite3.Error as error:
        guard.close()
        if "locked" in str(error):
            raise BusyError(
                f"Another Moestro is already running on the data in {file.parent}. Use that one, close it, "
                "or set MOESTRO_HOME to another folder."
            ) from None
        raise
    return guard


def _no_room(folder: Path) -> bool:
    """Whether the disk is full; SQLite reports some failed writes as "disk I/O error"."""
    try:
        return shutil.disk_usage(folder).free < NO_ROOM
    except OSError:
        return False


def _plain(error: Exception, doing: str, path: Path) -> StoreError:
    if isinstance(error, OverflowError):
        return StoreError(f"Moestro could not {doing}: there is no number so large here.")
    if isinstance(error, UnicodeEncodeError):
        return StoreError(
            f"Moestro could not {doing}: the text contains an unpaired surrogate, which is not a character. Remove it."
        )
    text = reason(error) if isinstance(error, OSError) else error_text(error)
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # the primary code, without the extended part
    if code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR) or "No space" in text:
        if code == sqlite3.SQLITE_IOERR and not _no_room(path.parent):
            return StoreError(f"Moestro could not {doing}: the disk failed ({text}). Check the disk, then try again.")
        return FullError(f"The disk is full: Moestro could not {doing}. Free some space, then try again.")
    if is_damage(error):
        return DamagedError(damaged(path, text))
    if "readonly" in text or "Permission" in text:
        return StoreError(f"Moestro may not write to its data folder, so it could not {doing}. Check its permissions.")
    if isinstance(error, OSError):
        return StoreError(f"Moestro could not {doing}: {text}. Move it away, or set MOESTRO_HOME to another folder.")
    return StoreError(f"Moestro could not {doing}: {text}.")
