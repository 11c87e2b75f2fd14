"""Reads traces of other tools: `.npz` arrays, and CSV or JSON lists of (token, layer, expert ids)."""

import csv
import io
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from core.errors import TraceError
from core.profile.trace.chunk import ArrayTrace, Trace, id_type
from core.profile.trace.file import MAGIC, FileTrace
from core.profile.trace.sound import TooLarge, require_bounded
from core.system.reading import BadJson, open_regular, parse_json, read_text

KINDS = "Moestro's own traces, .npz with an array `experts` [layers, tokens, k], .csv, .json and .jsonl"
IDS = ("experts", "expert_ids", "expert", "ids")  # names of the field of expert ids in JSON objects
Row = tuple[int, int, list[int]]  # token, layer, expert ids
JSON_BYTES = 1 << 30  # most bytes of a JSON trace, which is parsed in memory
MOST_EXPERTS = 2**15  # in a layer; also the most ids of one token there
MOST_IDS = 2**31  # in a whole trace that is held in memory
WORD = re.compile(r"[^\s,;|\[\](){}'\"]+")
DIGITS = re.compile(r"[+-]?[0-9]{1,18}")


def open_trace(path: Path, experts: int = 0) -> Trace:
    """Opens a trace of any kind. `experts` = experts per layer, where the file does not say; 0 = the largest id seen,
    plus one. Raises TraceError in the user's words."""
    if not path.exists():
        raise TraceError(f"There is no trace {path}.")
    kind = path.suffix.lower()
    try:
        with open_regular(path, TraceError) as file:
            if file.read(len(MAGIC)) == MAGIC:
                return FileTrace(path)
            file.seek(0)
            if kind == ".npz":
                return _npz(path, file, experts)
            if kind == ".csv":
                rows = csv.reader(io.TextIOWrapper(file, encoding="utf-8", newline=""))
                return _listed(path, _csv_rows(rows), experts)
        if kind in (".json", ".jsonl"):
            return _listed(path, _json_rows(read_text(path, JSON_BYTES, TraceError)), experts)
    except OSError as error:
        raise TraceError(f"The trace {path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError:
        raise TraceError(f"{path} is not UTF-8 text.") from None
    except (BadJson, csv.Error) as error:
        raise TraceError(f"{path} cannot be read as a trace: {error}.") from error
    raise TraceError(f"{path} is not a trace that Moestro reads. It reads {KINDS}.")


def _npz(path: Path, opened: BinaryIO, experts: int) -> ArrayTrace:
    try:
        require_bounded(opened)
        opened.seek(0)
        with np.load(opened, allow_pickle=False) as file:
            names = file.files
            arrays = {name: file[name] for name in ("experts", "weights", "tok", "rid") if name in names}
    except TooLarge as error:
        raise TraceError(f"{path} is not a readable .npz file: {error}.") from None
    except Exception as error:  # zipfile, zlib and numpy each have their own errors
        raise TraceError(f"{path} is not a readable .npz file, or an array in it is damaged.") from error
    if "experts" not in arrays:
        raise TraceError(f"{path} has no array `experts` [layers, tokens, k]. It has: {', '.join(names[:9])}.")
    ids = arrays.pop("experts")
    if ids.ndim != 3 or ids.dtype.kind not in "iu" or 0 in ids.shape:
        raise TraceError(
            f"`experts` in {path} must be whole numbers [layers, tokens, k], not {ids.dtype} {list(ids.shape)}."
        )
    extras = {name: _extra(path, name, array, ids.shape) for name, array in arrays.items()}
    count = _experts(path, int(ids.min()), int(ids.max()), experts)
    if "weights" in extras:
        extras["weights"] = extras["weights"].transpose(1, 0, 2)
    return ArrayTrace(ids.astype(id_type(count)).transpose(1, 0, 2), count, **extras)


def _extra(path: Path, name: str, array: Any, shape: tuple[int, ...]) -> Any:
    """Checks an array beside `experts` for this shape: the router's weights, token ids, or the ids of their answers."""
    if array.shape != (shape if name == "weights" else shape[1:2]):
        raise TraceError(
            f"`{name}` in {path} has shape {list(array.shape)}, which does not go with `experts` {list(shape)}."
        )
    if name == "weights":
        half = np.finfo(np.float16)
        if array.dtype.kind not in "fiu" or not (np.abs(array.astype(np.float64)) <= half.max).all():
            raise TraceError(f"`weights` in {path} must be finite numbers up to {half.max:g}.")
    elif array.dtype.kind not in "iu" or not 0 <= int(array.min()) <= int(array.max()) < 2**31:
        raise TraceError(f"`{name}` in {path} must be whole numbers from 0 to {2**31 - 1}.")
    return array


def _experts(path: Path, least: int, most: int, asked: int) -> int:
    if least < 0:
        raise TraceError(f"{path} names expert {least}; experts count from 0.")
    if asked and most >= asked:
        raise TraceError(f"{path} names expert {most}, but {asked} experts were said to be in a layer.")
    if most >= MOST_EXPERTS:
        raise TraceError(f"{path} names expert {most}, which is more than any model has. Ids count within a layer.")
    return asked or most + 1


def _csv_rows(rows: Iterable[list[str]]) -> Iterator[Row]:
    """Parses token, layer, ids: in one cell or several, one line per token and layer or one per expert;
    skips a header."""
    for number, cells in enumerate(rows, 1):
        if not cells or (number == 1 and not cells[0].strip().lstrip("-").isdigit()):
            continue
        try:
            ids = [_number(word) for cell in cells[2:] for word in WORD.findall(cell)]
            yield _number(cells[0]), _number(cells[1]), ids
        except (ValueError, IndexError):
            raise TraceError(f"Line {number} is not token, layer, expert ids.") from None


def _json_rows(text: str) -> Iterator[Row]:
    """Parses a list, or one value per line: {"token": .., "layer": .., "experts": [..]} or [token, layer, [ids]]."""
    first, _, second = text.lstrip().partition("\n")
    if second.strip() and _is_json(first):
        rows = list(_lines(text))
    else:
        rows = parse_json(text)
    if isinstance(rows, dict):
        rows = rows.get("trace", [rows])
    if not isinstance(rows, list):
        raise BadJson("it is not a list of token, layer, expert ids")
    for number, row in enumerate(rows, 1):
        try:
            if isinstance(row, dict):
                ids = next(row[name] for name in IDS if name in row)
                token, layer = row["token"], row["layer"]
            else:
                token, layer, ids = row[0], row[1], row[2] if len(row) == 3 else row[2:]
            yield _number(token), _number(layer), [_number(e) for e in (ids if isinstance(ids, list) else [ids])]
        except (KeyError, StopIteration, TypeError, ValueError, IndexError):
            raise TraceError(f"Entry {number} is not token, layer, expert ids.") from None


def _lines(text: str) -> Iterator[Any]:
    for number, line in enumerate(text.splitlines(), 1):
        try:
            if line.strip():
                yield parse_json(line)
        except BadJson as error:
            raise BadJson(f"line {number}: {error}") from None


def _is_json(line: str) -> bool:
    try:
        parse_json(line)
    except BadJson:
        return False
    return True


def _number(value: object) -> int:
    """Parses a whole number, or its digits. Raises ValueError for anything else, even where int() would accept it."""
    if isinstance(value, str) and DIGITS.fullmatch(value.strip()):
        return int(value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) >= 2**63:
        raise ValueError
    return value


def _listed(path: Path, rows: Iterable[Row], experts: int) -> ArrayTrace:
    """Tokens in order of appearance; layers by number. Where a layer of a token has fewer experts than the largest
    number, its first one is repeated, which adds no request."""
    found: dict[int, dict[int, list[int]]] = {}
    for token, layer, ids in rows:
        found.setdefault(token, {}).setdefault(layer, []).extend(ids)
    layers = sorted({layer for by_layer in found.values() for layer in by_layer})
    if not found:
        raise TraceError(f"{path} has no rows.")
    if layers[0] < 0:
        raise TraceError(f"{path} names layer {layers[0]}; layers count from 0.")
    for token, by_layer in found.items():
        if missing := [layer for layer in layers if not by_layer.get(layer)]:
            raise TraceError(f"{path} has no experts for token {token} in layer {missing[0]}.")
    k = max(len(ids) for by_layer in found.values() for ids in by_layer.values())
    if k > MOST_EXPERTS or k * len(found) * len(layers) > MOST_IDS:
        raise TraceError(
            f"{path} names up to {k:,} experts for each of {len(found):,} tokens in {len(layers):,} "
            "layers, which is more than any model uses."
        )
    array: Any = np.array(
        [
            [ids + ids[:1] * (k - len(ids)) for ids in (by_layer[layer] for layer in layers)]
            for by_layer in found.values()
        ],
        np.int64,
    )
    count = _experts(path, int(array.min()), int(array.max()), experts)
    return ArrayTrace(array.astype(id_type(count)), count)
