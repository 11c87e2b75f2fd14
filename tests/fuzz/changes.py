"""The changes that make a mutant of a sample: each one plain JSON, so that a seed file holds them as they are.

A change is {"do": name, "file": path in the sample, ...}; `apply` carries it out, and does nothing where an earlier
change took away what it would act on. JSON changes also work on the header of a safetensors file.
"""

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

Change = dict[str, Any]
Act = Callable[[Path, Mapping[str, Any]], None]
Key = str | int
MARK = "\u0001mutant\u0001"  # stands for raw text while a document is written
ACTS: dict[str, Act] = {}
PLACES = ("missing", "empty", "directory", "dangling", "loop", "fifo", "endless")  # of a file


class Gone(Exception):
    """What a change would act on is not there any more."""


def act(*names: str) -> Callable[[Act], Act]:
    """Register what carries out the changes of these names; it raises `Gone` where it cannot."""

    def put(function: Act) -> Act:
        ACTS.update(dict.fromkeys(names, function))
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


def owner_of(document: Any, at: Sequence[Key], there: bool = True) -> Any:
    """The object or list that holds the last key of `at`; `there`: that key, too, has to be. Raises Gone."""
    try:
        for key in at[:-1]:
            document = document[key]
        if there:
            document[at[-1]]
    except (KeyError, IndexError, TypeError):
        raise Gone from None
    return document


@act("set", "add", "double", "drop", "rename", "swap")
def change_json(file: Path, change: Mapping[str, Any]) -> None:
    """A value is set, a key is added, doubled in its object, dropped or renamed, or two values trade places."""
    document, at, do = read_document(file), change["at"], change["do"]
    if not at:
        write_text(file, raw_value(change))
        return
    owner, key = owner_of(document, at, there=do != "add"), at[-1]
    if do in ("add", "double", "rename") and not isinstance(owner, dict):
        raise Gone
    match do:
        case "set" | "add":
            owner[key] = MARK
        case "double":
            owner[MARK + "key"] = MARK
        case "drop":
            del owner[key]
        case "rename":
            owner[change["to"]] = owner.pop(key)
        case "swap":
            other = change["with"]
            owner[key], owner[other] = owner_of(document, [*at[:-1], other])[other], owner[key]
    text = json.dumps(document).replace(json.dumps(MARK + "key"), json.dumps(key))
    mark = json.dumps(MARK)
    write_text(file, text.replace(mark, raw_value(change)) if mark in text else text)


def raw_value(change: Mapping[str, Any]) -> str:
    """The JSON text that a change puts in: as it says, or too long for a seed file."""
    if "depth" in change:
        return "[" * change["depth"] + "]" * change["depth"]
    return json.dumps("x" * change["long"]) if "long" in change else str(change["raw"])


# -- arrays by their names ---------------------------------------------------------------------------------------------


def change_array(arrays: dict[str, Any], name: str, change: Mapping[str, Any]) -> None:
    """An array is left out or renamed, or has another shape, another type ("type") or number ("at", "value")."""
    if name not in arrays:
        raise Gone
    array = arrays.pop(name)
    match change["as"]:
        case "rename":
            arrays[f"{name}x"] = array
        case "shape":
            arrays[name] = np.ascontiguousarray(array.reshape(-1)[:-1])
        case "empty":
            arrays[name] = array[..., :0]
        case "type":
            other = np.int32 if array.dtype.kind == "f" else np.float32
            arrays[name] = array.astype(change.get("type", other))
        case "value":
            wide = array.astype(np.float64 if array.dtype.kind == "f" else np.int64)
            with np.errstate(invalid="ignore"):
                wide.reshape(-1)[change["at"] % max(1, wide.size)] = np.float64(change["value"]).astype(wide.dtype)
                arrays[name] = wide if "type" in change else wide.astype(array.dtype)


# -- bytes and lines ---------------------------------------------------------------------------------------------------


def patch(file: Path, offset: int, data: bytes) -> None:
    """Overwrite bytes of a file, within its size."""
    with file.open("r+b") as handle:
        size = handle.seek(0, os.SEEK_END)
        handle.seek(offset)
        handle.write(data[: max(0, size - offset)])


@act("flip", "write", "zero", "cut", "append")
def change_bytes(file: Path, change: Mapping[str, Any]) -> None:
    match change["do"]:
        case "flip":
            byte = file.read_bytes()[change["offset"]]
            patch(file, change["offset"], bytes([byte ^ (1 << change["bit"])]))
        case "write":
            patch(file, change["offset"], bytes.fromhex(change["hex"]))
        case "zero":
            patch(file, change["offset"], bytes(change["count"]))
        case "cut":
            os.truncate(file, min(change["length"], file.stat().st_size))
        case "append":
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
