"""Draws changes at random from what a file is: a value of a JSON document, a byte, or the file itself."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

from tests.fuzz.changes import Change, Gone, possible_places, read_document

NUMBERS = (
    "0 1 -1 2 3 7 64 1000000 2147483647 4294967296 9223372036854775808 1000000000000000000000000000000 -1000000000 "
    "0.5 -0.5 1e-45 1e308 1e400 NaN Infinity -Infinity"
).split()
OTHERS = (
    'null true false "" "x" "1" "NaN" "../../x" "\\ud800" "\\u0000" [] {} [[]] [1,2,3] {"a":1} [null] "float32" "auto"'
).split()
DEPTH, LONG = 100_000, 1_000_000


def value_near(rng: Random, value: Any) -> str:
    """JSON text in place of a value: often of its kind and not far off, else of another kind."""
    if rng.random() < 0.45:
        if isinstance(value, bool):
            return json.dumps(not value)
        if isinstance(value, int):
            return json.dumps(rng.choice([value + 1, value - 1, value * 2, value // 2, -value, value + 32]))
        if isinstance(value, float):
            return json.dumps(rng.choice([-value, value * 2, value / 2, 0.0, value + 1]))
        if isinstance(value, str) and value:
            return json.dumps(rng.choice([value[:-1], value + "x", value.upper(), value[::-1], value * 2]))
        if isinstance(value, list) and value:
            return json.dumps(rng.choice([value[:-1], value + value[:1], value[::-1], value * 2]))
    return rng.choice(NUMBERS if rng.random() < 0.5 else OTHERS)


def json_path(rng: Random, document: Any, deeper: float = 0.6) -> list[str | int]:
    """A place in a document, by a walk that goes on into what it meets with probability `deeper`."""
    at: list[str | int] = []
    while isinstance(document, dict | list) and document and (not at or rng.random() < deeper):
        key: Any = rng.choice(list(document)) if isinstance(document, dict) else rng.randrange(len(document))
        at.append(key)
        document = document[key]
    return at


def json_change(rng: Random, root: Path, file: str, within: Sequence[str | int] = ()) -> Change:
    """A change somewhere in a document, or below `within`."""
    try:
        document = read_document(root / file)
        for key in within:
            document = document[key]
    except (Gone, KeyError, IndexError, TypeError):
        return byte_change(rng, root, file)
    inside = json_path(rng, document)
    owner, value = None, document
    for key in inside:
        owner, value = value, value[key]
    at = [*within, *inside]
    change: Change = {"file": file, "at": at}
    roll = rng.random()
    if not at or roll < 0.55:
        return {**change, "do": "set", "raw": value_near(rng, value)}
    if roll < 0.70:
        return {**change, "do": "drop"}
    if roll < 0.78:
        return {**change, "do": "double", "raw": value_near(rng, value)}
    if roll < 0.83:
        return {**change, "do": "rename", "to": rng.choice([f"{at[-1]}x", "", "model_type", "weight"])}
    if roll < 0.88 and isinstance(owner, dict):
        return {**change, "do": "swap", "with": rng.choice(list(owner))}
    if roll < 0.92:
        return {**change, "do": "set", "depth": rng.choice([200, DEPTH])}
    if roll < 0.94:
        return {**change, "do": "set", "long": LONG}
    if roll < 0.97:
        return {
            **change,
            "do": "add",
            "at": [*at[:-1], rng.choice(["text_config", "quantization_config", "dtype", "__metadata__", "auto_map"])],
            "raw": rng.choice((*NUMBERS, *OTHERS)),
        }
    return {**change, "do": "set", "at": [], "raw": rng.choice(OTHERS)}


def byte_change(rng: Random, root: Path, file: str, within: range | None = None) -> Change:
    """A bit, some bytes, or the end of a file; `within` = the offsets to choose from, all of them by default."""
    try:
        size = (root / file).stat().st_size
    except OSError:
        size = 0
    space = within if within is not None and len(within) else range(max(1, size))
    offset = space[rng.randrange(len(space))]
    change: Change = {"file": file}
    match rng.choice(["flip", "flip", "write", "zero", "cut", "append"]):
        case "flip":
            return {**change, "do": "flip", "offset": offset, "bit": rng.randrange(8)}
        case "write":
            return {**change, "do": "write", "offset": offset, "hex": rng.randbytes(rng.choice([1, 4, 8])).hex()}
        case "zero":
            return {**change, "do": "zero", "offset": offset, "count": rng.choice([1, 8, 512])}
        case "cut":
            return {**change, "do": "cut", "length": rng.choice([0, 1, 7, 8, offset, size // 2, max(0, size - 1)])}
    return {**change, "do": "append", "hex": rng.randbytes(rng.choice([1, 8, 64])).hex()}


def file_change(rng: Random, file: str) -> Change:
    """Something else in the place of a file."""
    return {"do": "place", "file": file, "as": rng.choice(possible_places())}


def header_bytes(root: Path, file: str) -> range:
    """The offsets of a safetensors file's header."""
    with (root / file).open("rb") as handle:
        return range(8 + int.from_bytes(handle.read(8), "little"))


def drawn(rng: Random, *ways: tuple[float, Callable[[], Change]]) -> list[Change]:
    """Changes of a mutant, each by one of `ways`, as often as its weight says: most have one, some two or three."""
    weights, draws = zip(*ways, strict=True)
    return [draw() for draw in rng.choices(draws, weights, k=rng.choice([1, 1, 1, 1, 2, 3]))]
