"""Keeps the user's files private: folders 0700, files 0600, also those of earlier versions.

Note: on Windows the access list of the user's data folder already excludes others, and nothing is done here."""

import logging
import os
import shutil
import stat
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Literal

from app.store.schema import StoreError

log = logging.getLogger("moestro.store")
FOLDER, FILE = 0o700, 0o600
POSIX = os.name == "posix"
OURS = ("moestro*.sqlite3*", "in-use.sqlite3*", "moestro.log*")  # files of the data folder itself
INSIDE = ("analysis", "backups", "batches", "bench", "exports", "profiles", "uploads")  # folders of our files alone
PACKS = "packs"  # only the folder itself: packs may be shared


def private_folder(folder: Path) -> Path:
    """Create a folder that only its user may enter; restricts an existing one. Raises OSError."""
    missing = [folder, *folder.parents]
    for each in reversed(missing[: next((n for n, one in enumerate(missing) if one.exists()), 0)]):
        each.mkdir(FOLDER, exist_ok=True)
    folder.mkdir(FOLDER, exist_ok=True)  # raises when something else has this name
    _close(folder, FOLDER)
    return folder


def data_folder(folder: Path) -> Path:
    """Create the user's data folder, or restrict an existing one. Raises StoreError when it cannot be written to."""
    try:
        private_folder(folder)
        with TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        raise StoreError(
            f"Moestro keeps your data in {folder}, and nothing can be written there: {error.strerror or error}. Make "
            "room and check your permissions, or let the environment variable MOESTRO_HOME name another folder."
        ) from error


def open_private(path: Path, mode: Literal["wb", "ab", "xb"] = "wb") -> IO[bytes]:
    """Open a file for binary writing, readable by its user only. Raises OSError."""
    touch_private(path)
    _close(path, FILE)
    return path.open(mode)


def clear(folder: Path, *patterns: str) -> None:
    """Delete what earlier runs left in a folder for temporary files: entries of these names. Other entries stay, since
    MOESTRO_HOME may be a folder of the user's that has such a folder itself. Follows no links; raises nothing."""
    if folder.is_symlink():
        return
    for pattern in patterns:
        for path in folder.glob(pattern):
            try:
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
            except OSError as error:
                log.info("%s was not deleted: %s", path, error.strerror or error)


def touch_private(path: Path) -> None:
    """Create an empty private file unless it exists. Raises OSError."""
    os.close(os.open(path, os.O_CREAT | os.O_RDWR, FILE))


def tighten(folder: Path) -> None:
    """Restrict files in a data folder that earlier versions left open. Touches only Moestro's own names; raises
    nothing."""
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
    """Whether the folder is not Moestro's own, whatever MOESTRO_HOME is: a system folder, or the whole home."""
    try:
        own = folder.resolve()
        return own in (Path.home().resolve(), Path(own.anchor)) or bool(own.stat().st_mode & stat.S_ISVTX)
    except OSError:
        return True


def _close(path: Path, mode: int) -> None:
    """Remove other users' permissions on one of the user's files or folders."""
    if not POSIX:
        return
    try:
        found = path.lstat()
        if stat.S_ISLNK(found.st_mode) or found.st_uid != os.geteuid():
            return
        if stat.S_IMODE(found.st_mode) & ~mode:
            path.chmod(stat.S_IMODE(found.st_mode) & mode)
    except OSError as error:  # e.g. a file system without permissions
        log.info("others may be able to read %s: %s", path, error.strerror or error)
