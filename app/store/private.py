"""The user's files are the user's alone: folders 0700, files 0600, also those of earlier versions.

Note: on Windows the folder for a user's data is closed to others by its own access list, and nothing is done here.
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Literal

log = logging.getLogger("moestro.store")
FOLDER, FILE = 0o700, 0o600
POSIX = os.name == "posix"
OURS = ("moestro*.sqlite3*", "in-use.sqlite3*", "moestro.log*")  # files of the data folder itself
INSIDE = ("analysis", "backups", "bench", "exports", "profiles", "uploads")  # ... and folders that hold nothing else
PACKS = "packs"  # only the folder: packs may be shared


def private_folder(folder: Path) -> Path:
    """Make a folder that only its user may enter; one that is there already is closed to others. Raises OSError."""
    missing = [folder, *folder.parents]
    for each in reversed(missing[: next((n for n, one in enumerate(missing) if one.exists()), 0)]):
        each.mkdir(FOLDER, exist_ok=True)
    folder.mkdir(FOLDER, exist_ok=True)  # raises when something else is there
    _close(folder, FOLDER)
    return folder


def open_private(path: Path, mode: Literal["wb", "ab", "xb"] = "wb") -> IO[bytes]:
    """Open a file for writing bytes that only its user may read. Raises OSError."""
    touch_private(path)
    _close(path, FILE)
    return path.open(mode)


def touch_private(path: Path) -> None:
    """Make an empty file that only its user may read, unless there is one. Raises OSError."""
    os.close(os.open(path, os.O_CREAT | os.O_RDWR, FILE))


def tighten(folder: Path) -> None:
    """Close what earlier versions left open in a data folder. Touches Moestro's own names alone, and raises nothing."""
    if not POSIX or _shared(folder):
        return
    _close(folder, FOLDER)
    for path in _ours(folder):
        _close(path, FOLDER if path.is_dir() else FILE)


def _ours(folder: Path) -> Iterable[Path]:
    for pattern in OURS:
        yield from folder.glob(pattern)
    for name in INSIDE:
        if (folder / name).is_dir() and not (folder / name).is_symlink():
            yield folder / name
            yield from (folder / name).rglob("*")
    if (folder / PACKS).is_dir():
        yield folder / PACKS


def _shared(folder: Path) -> bool:
    """A folder that is not Moestro's own, whatever MOESTRO_HOME says: the system's, or the whole home."""
    try:
        own = folder.resolve()
        return own in (Path.home().resolve(), Path(own.anchor)) or bool(own.stat().st_mode & stat.S_ISVTX)
    except OSError:
        return True


def _close(path: Path, mode: int) -> None:
    """Take from a file or folder of the user's what others may do with it."""
    if not POSIX:
        return
    try:
        found = path.lstat()
        if stat.S_ISLNK(found.st_mode) or found.st_uid != os.geteuid():
            return
        if stat.S_IMODE(found.st_mode) & ~mode:
            path.chmod(stat.S_IMODE(found.st_mode) & mode)
    except OSError as error:  # such as a disk that knows no permissions
        log.info("others may be able to read %s: %s", path, error.strerror or error)
