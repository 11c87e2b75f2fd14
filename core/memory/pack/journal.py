"""The journal of an unfinished import: one line identifies the import, and one describes each finished file."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from core.memory.pack.checked_json import CheckedObject, InvalidValue, whole
from core.memory.pack.manifest import DENSE, MOST_LAYERS, layer_file
from core.memory.pack.manifest_json import PackFile
from core.system.reading import INDEX_BYTES, BadJson, parse_json, read_bytes

JOURNAL = "journal.jsonl"
LAYER_FILES = frozenset(layer_file(layer) for layer in range(MOST_LAYERS))


class Done(NamedTuple):
    """A finished file: `sums` of its blobs, and notes of its writer (text by text)."""

    entry: PackFile
    sums: tuple[int, ...] = ()
    notes: Mapping[str, str] = {}


def line_of(name: str, done: Done) -> str:
    """The journal line that describes a finished file."""
    return json.dumps({"file": name, "entry": done.entry, "sums": done.sums, "notes": dict(done.notes)})


def finished_in(journal: Path, identity: Mapping[str, Any]) -> dict[str, Done]:
    """The finished files that a journal lists, ignoring a truncated last line.

    Empty, so that everything is written anew, when the journal belongs to another import or is damaged: then no line
    can be trusted. Raises ModelError when it cannot be read.
    """
    if not os.path.lexists(journal):
        return {}
    *lines, _ = read_bytes(journal, INDEX_BYTES).split(b"\n")
    try:
        stated = [parse_json(line) for line in lines]
        return dict(_done_of(CheckedObject(one)) for one in stated[1:]) if stated[:1] == [identity] else {}
    except (BadJson, InvalidValue):
        return {}


def is_journal(file: Path) -> bool:
    """Whether a file is what an import writes: its first line is the identity of one. Raises ModelError when it
    cannot be read."""
    first, ended, _ = read_bytes(file, INDEX_BYTES).partition(b"\n")
    try:
        identity = parse_json(first) if ended else None
    except BadJson:
        return False
    return isinstance(identity, dict) and {"pack", "model_hash", "moestro"} <= identity.keys()


def _done_of(stated: CheckedObject) -> tuple[str, Done]:
    """The file that a journal line describes. Raises InvalidValue for a line that no import writes."""
    stated.only("file", "entry", "sums", "notes")
    name, entry = stated.text("file"), stated.values("entry")
    if name != DENSE and name not in LAYER_FILES:
        raise InvalidValue(f"its file is {name!r:.60}, which no import writes")
    if len(entry) != 3 or not all(isinstance(text, str) for text in entry[1:]):
        raise InvalidValue(f"its entry is {entry!r:.60}, not a size and two hashes")
    sums = tuple(whole(number, "sums", 0, (1 << 32) - 1) for number in stated.values("sums"))
    return name, Done(PackFile(whole(entry[0], "entry", 0), entry[1], entry[2]), sums, stated.texts("notes"))
