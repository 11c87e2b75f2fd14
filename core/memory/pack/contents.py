"""Which files of a folder belong to a pack, finished or not, and their deletion. All other files are left untouched."""

import os
import stat
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

from core.errors import ModelError
from core.memory.pack.journal import JOURNAL, LAYER_FILES, is_journal
from core.memory.pack.manifest import DENSE, NAME, Manifest
from core.memory.pack.sync import fresh_of, sync_dir
from core.system.reading import shown

REMOVED = f"{NAME}.removed"  # the manifest of a pack while it is deleted, so that an interrupted deletion can go on
BUDDIES = "buddies.safetensors"  # written by `calibrate`; not in the manifest
CONFIG = "config.json"
COPIED = (
    "generation_config.json",
    "tokenizer*",
    "*token*.json",
    "vocab.*",
    "merges.txt",
    "chat_template*",
    "*.tiktoken",
    "spiece.model",
    "sentencepiece*.model",
    "tekken.json",
    "LICENSE*",
)
"""Patterns of the files that an import copies from the checkpoint."""


class Contents(NamedTuple):
    """The files of a folder. `own`: names of the pack's own files. `foreign`: names of everything else, folders with a
    slash at their end. `bytes` = size of the own files."""

    own: tuple[str, ...]
    foreign: tuple[str, ...]
    bytes: int


def is_pack_file(name: str) -> bool:
    """Whether an import may write a file of this name into a pack, manifest and journal aside."""
    return (
        name in (DENSE, CONFIG)
        or name in LAYER_FILES
        or (not set(name) & set("/\\:\0") and any(fnmatchcase(name, pattern) for pattern in COPIED))
    )


def contents(folder: Path) -> Contents:
    """What of a folder a pack, or an unfinished import, consists of: files that its manifest names, or, while there is
    a journal, files with the names that an import writes.

    Raises ModelError, with what to do, when neither can be trusted or the folder is a link; OSError.
    """
    if _is_link(folder):
        raise ModelError(f"{shown(folder)} is a link to another folder. Remove the link with your file manager.")
    own, foreign, size = [], [], 0
    belongs = _rule(folder)
    with os.scandir(folder) as found:
        for entry in sorted(found, key=lambda e: e.name):
            if belongs(entry.name) and (entry.is_symlink() or entry.is_file()):
                own.append(entry.name)
                size += entry.stat(follow_symlinks=False).st_size
            else:
                foreign.append(_displayed(entry))
    return Contents(tuple(own), tuple(foreign), size)


def delete(folder: Path) -> Contents:
    """Delete a pack's or an unfinished import's own files, and the folder if nothing else is in it. Returns what was
    deleted and what is left.

    The manifest is renamed first, so that an interrupted deletion leaves no valid pack, and what describes the files
    goes last, so that it can be repeated. Raises ModelError, with nothing deleted, as `contents` does; OSError.
    """
    found = contents(folder)
    if NAME in found.own:
        os.replace(folder / NAME, folder / REMOVED)
        sync_dir(folder)
    last = (REMOVED, JOURNAL)
    for name in (*(own for own in found.own if own not in (NAME, *last)), *last):
        (folder / name).unlink(missing_ok=True)
    left = _listing(folder)  # again: files may have come
    if not left:
        os.rmdir(folder)
    return found._replace(foreign=left)


def _listing(folder: Path) -> tuple[str, ...]:
    with os.scandir(folder) as found:
        return tuple(sorted(map(_displayed, found)))


def _displayed(entry: os.DirEntry[str]) -> str:
    """A name for the user, a folder's with a slash at its end."""
    return shown(entry.name) + "/" * entry.is_dir(follow_symlinks=False)


def names(files: Sequence[str], most: int = 8) -> str:
    """File names as text: a few of them and the number of the others; expert files are counted."""
    layers = [name for name in files if name in LAYER_FILES]
    others = [name for name in files if name not in LAYER_FILES]
    words = [" ".join(name.split()) for name in others[:most]]
    if len(others) > most:
        words.append(f"{len(others) - most:,} more")
    if layers:
        words.append(layers[0] if len(layers) == 1 else f"{layers[0]} to {layers[-1]} ({len(layers)} files)")
    return ", ".join(words)


def _rule(folder: Path) -> Callable[[str], bool]:
    """Whether a file in the folder is the pack's own, by its name. Raises ModelError when that is unknown."""
    journals = {JOURNAL, fresh_of(JOURNAL)}
    if os.path.lexists(folder / JOURNAL):
        if not is_journal(folder / JOURNAL):
            raise ModelError(in_the_way(folder))
        ours = journals | {NAME, fresh_of(NAME), REMOVED, BUDDIES}
        return lambda name: name in ours or is_pack_file(name)
    for name in (NAME, REMOVED):
        if os.path.lexists(folder / name):
            named = {file for file in Manifest.load(folder, name).files if is_pack_file(file)}
            ours = named | {NAME, REMOVED, BUDDIES, fresh_of(BUDDIES), fresh_of(JOURNAL)}
            return ours.__contains__
    if os.path.lexists(folder / fresh_of(JOURNAL)):  # the import was stopped before it had begun
        return journals.__contains__
    raise ModelError(in_the_way(folder))


def in_the_way(folder: Path) -> str:
    """Error text for a folder that no import made."""
    return f"{shown(folder)} is in the way: it is not what an import left. Move it away, or choose another directory."


def _is_link(folder: Path) -> bool:
    """Whether a folder is a symbolic link or, on Windows, a junction. Raises OSError."""
    found = os.lstat(folder)
    return stat.S_ISLNK(found.st_mode) or getattr(found, "st_reparse_tag", 0) == 0xA0000003
