"""The changes that make a mutant of a sample: each one plain JSON, so that a seed file holds them as they are.

A change is {"do": name, "file": path in the sample, ...}; `apply` carries it out, and does nothing where an earlier
change took away what it would act on. JSON changes also work on the header of a safetensors file.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

Change = dict[str, Any]
Act = Callable[[Path, Mapping[str, Any]], None]
Key = str | int
MARK = "\u0001mutant\u0001"  # stands for raw text while a document is written
ACTS: dict[str, Act] = {}
PLACES = ("missing", "empty", "directory", "dangling", "loop", "fifo", "endless")  # of a file


class Gone(Exception):
    """What a change would act on is not there any more."""


def act(name: str) -> Callable[[Act], Act]:
    """Register what carries out the changes of this name; it raises `Gone` where it cannot."""

    def put(function: Act) -> Act:
        ACTS[name] = function
        return function

    return put


def apply(changes: Sequence[Change], root: Path) -> None:
    """Carry changes out on the files under `root`, in order."""
    for change in changes:
        file = root / change.get("file", "")
        if change["do"] != "place" and not file.is_file():
            continue  # reading what took its place may never end
        try:
            ACTS[change["do"]](file, change)
        except (Gone, OSError, LookupError, TypeError, ValueError):  # an earlier change left nothing to act on
            continue


# -- JSON, alone or in the head of a safetensors file ------------------------------------------------------------------


def read_document(file: Path) -> Any:
    """The JSON of a file, or of a safetensors file's header. Raises Gone."""
    try:
        data = file.read_bytes()
        if file.suffix == ".safetensors":
            data = data[8 : 8 + int.from_bytes(data[:8], "little")]
        return json.loads(data)
    except (OSError, ValueError, RecursionError):
        raise Gone from None


def write_text(file: Path, text: str) -> None:
    """The other way round, with the same tensors behind the header."""
    data = text.encode("utf-8", "surrogatepass")
    if file.suffix == ".safetensors":
        old = file.read_bytes()
        data += b" " * (-len(data) % 8)
        data = len(data).to_bytes(8, "little") + data + old[8 + int.from_bytes(old[:8], "little") :]
    file.write_bytes(data)


def owner_of(document: Any, at: Sequence[Key]) -> Any:
    """The object or list that holds the last key of `at`. Raises Gone."""
    try:
        for key in at[:-1]:
            document = document[key]
        document[at[-1]]
    except (KeyError, IndexError, TypeError):
        raise Gone from None
    return document


def text_of(document: Any, raw: Mapping[str, str]) -> str:
    """JSON in which quoted marks are replaced by raw text."""
    text = json.dumps(document)
    for mark, value in raw.items():
        text = text.replace(json.dumps(mark), value)
    return text


def raw_value(change: Mapping[str, Any]) -> str:
    """The JSON text that a change puts in: as it says, or too long for a seed file."""
    if "depth" in change:
        return "[" * change["depth"] + "]" * change["depth"]
    return json.dumps("x" * change["long"]) if "long" in change else str(change["raw"])


@act("set")
def set_value(file: Path, change: Mapping[str, Any]) -> None:
    document, at = read_document(file), change["at"]
    if not at:
        write_text(file, raw_value(change))
        return
    owner_of(document, at)[at[-1]] = MARK
    write_text(file, text_of(document, {MARK: raw_value(change)}))


@act("add")
def add_value(file: Path, change: Mapping[str, Any]) -> None:
    """A key that was not there."""
    document, at = read_document(file), change["at"]
    owner = document if len(at) == 1 else owner_of(document, at[:-1])[at[-2]]
    if not isinstance(owner, dict):
        raise Gone
    owner[at[-1]] = MARK
    write_text(file, text_of(document, {MARK: raw_value(change)}))


@act("double")
def double_key(file: Path, change: Mapping[str, Any]) -> None:
    """The same key once more in the same object, with another value."""
    document, at = read_document(file), change["at"]
    owner = owner_of(document, at)
    if not isinstance(owner, dict):
        raise Gone
    owner[MARK + "key"] = MARK
    write_text(file, text_of(document, {MARK: raw_value(change), MARK + "key": json.dumps(at[-1])}))


@act("drop")
def drop_key(file: Path, change: Mapping[str, Any]) -> None:
    document = read_document(file)
    del owner_of(document, change["at"])[change["at"][-1]]
    write_text(file, json.dumps(document))


@act("rename")
def rename_key(file: Path, change: Mapping[str, Any]) -> None:
    document, at = read_document(file), change["at"]
    owner = owner_of(document, at)
    if not isinstance(owner, dict):
        raise Gone
    owner[change["to"]] = owner.pop(at[-1])
    write_text(file, json.dumps(document))


@act("swap")
def swap_values(file: Path, change: Mapping[str, Any]) -> None:
    """Two values of one object trade places."""
    document, at, other = read_document(file), change["at"], change["with"]
    owner = owner_of(document, at)
    owner_of(document, [*at[:-1], other])
    owner[at[-1]], owner[other] = owner[other], owner[at[-1]]
    write_text(file, json.dumps(document))


# -- bytes -------------------------------------------------------------------------------------------------------------


def patch(file: Path, offset: int, data: bytes) -> None:
    """Overwrite bytes of a file, within its size."""
    with file.open("r+b") as handle:
        size = handle.seek(0, os.SEEK_END)
        handle.seek(offset)
        handle.write(data[: max(0, size - offset)])


@act("flip")
def flip_bit(file: Path, change: Mapping[str, Any]) -> None:
    with file.open("rb") as handle:
        handle.seek(change["offset"])
        byte = handle.read(1)
    if byte:
        patch(file, change["offset"], bytes([byte[0] ^ (1 << change["bit"])]))


@act("write")
def write_bytes(file: Path, change: Mapping[str, Any]) -> None:
    patch(file, change["offset"], bytes.fromhex(change["hex"]))


@act("zero")
def zero_bytes(file: Path, change: Mapping[str, Any]) -> None:
    patch(file, change["offset"], bytes(change["count"]))


@act("cut")
def cut_short(file: Path, change: Mapping[str, Any]) -> None:
    os.truncate(file, min(change["length"], file.stat().st_size))


@act("append")
def append_bytes(file: Path, change: Mapping[str, Any]) -> None:
    with file.open("ab") as handle:
        handle.write(bytes.fromhex(change["hex"]))


@act("text")
def whole_text(file: Path, change: Mapping[str, Any]) -> None:
    file.write_text(change["text"], encoding="utf-8")


@act("lines")
def replace_line(file: Path, change: Mapping[str, Any]) -> None:
    """One line of a text: another one, none, or itself twice."""
    lines = file.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    if change["line"] >= len(lines):
        raise Gone
    lines[change["line"] : change["line"] + 1] = change["to"]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8", errors="surrogateescape")


# -- what is there in place of a file ----------------------------------------------------------------------------------


def possible_places() -> tuple[str, ...]:
    """PLACES that this system has."""
    return tuple(
        p
        for p in PLACES
        if (p != "fifo" or hasattr(os, "mkfifo"))
        and (p != "endless" or Path("/dev/zero").exists())
        and (p not in ("loop", "dangling", "endless") or os.name == "posix")
    )


@act("place")
def put_in_place(file: Path, change: Mapping[str, Any]) -> None:
    kind = change["as"]
    if kind not in possible_places():
        raise Gone
    if file.is_dir() and not file.is_symlink():
        shutil.rmtree(file)
    else:
        file.unlink(missing_ok=True)
    if kind == "empty":
        file.touch()
    elif kind == "directory":
        file.mkdir()
    elif kind == "fifo":
        os.mkfifo(file)
    elif kind in ("loop", "dangling", "endless"):
        file.symlink_to({"loop": file.name, "dangling": "nothing-there", "endless": "/dev/zero"}[kind])
