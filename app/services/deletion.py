"""Deletion of the library's packs: their own files. Foreign files stay."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from app.services.candidates import DAMAGED, Entry
from app.services.library import same_place
from core.errors import MoestroError
from core.system.reading import reason
from core.system.wording import format_bytes

if TYPE_CHECKING:
    from core.memory.pack.contents import Contents


def removable(entry: Entry, busy: Iterable[str]) -> None:
    """Raises MoestroError with the reason when an entry must not be deleted. `busy`: paths in use."""
    if entry.kind == DAMAGED:
        raise MoestroError(entry.problem)
    if not entry.can_delete:
        raise MoestroError("Only packs are deleted from here. Delete this model with your file manager or `hf cache`.")
    path = same_place(Path(entry.path))
    if any(path == same_place(Path(one)) or path in same_place(Path(one)).parents for one in busy):
        raise MoestroError(f"{entry.name} is in use. Unload it, or let its import end, then delete it.")


def inspect(entry: Entry) -> Contents:
    """What `delete` would delete and leave. Raises MoestroError when the entry must not be deleted."""
    from core.memory.pack.contents import contents

    removable(entry, ())
    try:
        return contents(Path(entry.path))
    except OSError as error:
        raise MoestroError(
            f"{entry.path} cannot be read: {reason(error)}. Check your permissions, and refresh the list."
        ) from error


def delete(entry: Entry, busy: Iterable[str] = ()) -> Contents:
    """Delete a pack; returns what was deleted and what is left in its folder.

    Raises MoestroError, with nothing deleted, when the entry must not be deleted."""
    removable(entry, busy)
    try:
        return _delete_pack(Path(entry.path))
    except OSError as error:
        raise MoestroError(
            f"{entry.name} was not deleted completely: {reason(error)}. Close what uses it, and check your "
            "permissions, then delete it again."
        ) from error


def describe(what: Contents) -> str:
    """What goes, as text: "3 files, 1.2 GB: config.json, ..."."""
    count = len(what.own)
    return f"{count:,} file{'s' if count != 1 else ''}, {format_bytes(what.bytes)}: {_names(what.own)}"


def stays(what: Contents) -> str:
    """What is left, as a sentence; "" when nothing is."""
    return f"What is not the pack's stays, and the folder with it: {_names(what.foreign)}." if what.foreign else ""


def outcome(entry: Entry, what: Contents) -> str:
    """What was deleted, and what was left, as text."""
    left = f" Left in the folder: {_names(what.foreign)} ({entry.path})." if what.foreign else ""
    return f"Deleted {entry.name}: {format_bytes(what.bytes)} are free again.{left}"


def _names(files: tuple[str, ...]) -> str:
    from core.memory.pack.contents import names

    return names(files)


def _delete_pack(path: Path) -> Contents:
    from core.memory.pack import contents
    from core.memory.pack.lock import Lock

    pack = path.with_name(path.name.removesuffix(".partial"))
    lock = Lock(pack.with_name(f"{pack.name}.lock"), f"An import{{}} is writing {pack}. Cancel it, then delete it.")
    try:
        return contents.delete(path)
    finally:
        lock.release()
