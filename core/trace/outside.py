"""Traces that others made: `.npz` arrays, and CSV or JSON lists of (token, layer, expert ids)."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from core.errors import TraceError
from core.reading import BadJson, open_regular, parse_json, read_text
from core.trace.chunk import ArrayTrace, Trace, id_type
from core.trace.file import MAGIC, FileTrace, require_bounded

KINDS = "Moestro's own traces, .npz with an array `experts` [layers, tokens, k], .csv, .json and .jsonl"
TEXT_BYTES = 512 << 20   # most that a trace written as text may have
IDS = ("experts", "expert_ids", "expert", "ids")   # names of the field of expert ids in JSON objects
Row = tuple[int, int, list[int]]                   # token, layer, expert ids


def open_trace(path: Path, experts: int = 0) -> Trace:
    """Open a trace of any kind. `experts` = experts in a layer, where the file does not say; 0 = the largest id seen,
    plus one. Raises TraceError in the user's words."""
    if not path.is_file():
        raise TraceError(f"There is no trace {path}.")
    try:
        with open_regular(path, TraceError) as file:
            if file.read(len(MAGIC)) == MAGIC:
                return FileTrace(path)
        kind = path.suffix.lower()
        if kind == ".npz":
            return _npz(path, experts)
        if kind == ".csv":
            with path.open(encoding="utf-8", newline="") as text:
                return _listed(path, _csv_rows(csv.reader(text)), experts)
        if kind in (".json", ".jsonl"):
            return _listed(path, _json_rows(read_text(path, TEXT_BYTES, TraceError)), experts)
    except OSError as error:
        raise TraceError(f"The trace {path} cannot be read: {error.strerror}.") from error
    except (ValueError, KeyError, TypeError, IndexError, OverflowError, csv.Error) as error:
        raise TraceError(f"{path} cannot be read as a trace: {error}.") from error
    raise TraceError(f"{path} is not a trace that Moestro reads. It reads {KINDS}.")


def _npz(path: Path, experts: int) -> ArrayTrace:
    try:
        require_bounded(path)
        with np.load(path, allow_pickle=False) as file:
            return _arrays(path, file, experts)
    except TraceError:
        raise
    except Exception as error:  # zipfile, zlib and numpy each have their own
        raise TraceError(f"{path} is not a readable .npz file ({error}).") from error


def _arrays(path: Path, file: Any, experts: int) -> ArrayTrace:
    if "experts" not in file.files:
        raise TraceError(f"{path} has no array `experts` [layers, tokens, k]. It has: {', '.join(file.files)}.")
    ids = file["experts"]
    if ids.ndim != 3 or not np.issubdtype(ids.dtype, np.integer) or 0 in ids.shape:
        raise TraceError(f"`experts` in {path} must be whole numbers [layers, tokens, k], not {ids.dtype} "
                         f"{list(ids.shape)}.")
    tokens = ids.shape[1]
    extras = {name: file[name] for name in ("weights", "tok", "rid") if name in file.files}
    for name, array in extras.items():
        if array.shape != (ids.shape if name == "weights" else (tokens,)):
            raise TraceError(f"`{name}` in {path} has shape {list(array.shape)}, which does not go with `experts` "
                             f"{list(ids.shape)}.")
    count = _experts(path, int(ids.min()), int(ids.max()), experts)
    if "weights" in extras:
        extras["weights"] = extras["weights"].transpose(1, 0, 2)
    return ArrayTrace(ids.astype(id_type(count)).transpose(1, 0, 2), count, **extras)


def _experts(path: Path, least: int, most: int, asked: int) -> int:
    if least < 0:
        raise TraceError(f"{path} names expert {least}; experts count from 0.")
    if asked and most >= asked:
        raise TraceError(f"{path} names expert {most}, but {asked} experts were said to be in a layer.")
    if most >= 2**15:
        raise TraceError(f"{path} names expert {most}, which is more than any model has. Ids count within a layer.")
    return asked or most + 1


def _csv_rows(rows: Iterable[list[str]]) -> Iterator[Row]:
    """token, layer, ids: in one cell or several, one line per token and layer or one per expert; a head is skipped."""
    for number, cells in enumerate(rows, 1):
        if not cells or (number == 1 and not cells[0].strip().lstrip("-").isdigit()):
            continue
        try:
            ids = [int(word) for cell in cells[2:] for word in re.findall(r"-?\w+", cell)]
            yield int(cells[0]), int(cells[1]), ids
        except (ValueError, IndexError):
            raise TraceError(f"Line {number} is not token, layer, expert ids: {','.join(cells)[:80]!r}.") from None


def _json_rows(text: str) -> Iterator[Row]:
    """A list, or one value per line: {"token": .., "layer": .., "experts": [..]} or [token, layer, [ids]]."""
    try:
        rows = parse_json(text)
    except BadJson:
        rows = [parse_json(line) for line in text.splitlines() if line.strip()]
    if isinstance(rows, dict):
        rows = rows.get("trace", [rows])
    if not isinstance(rows, list):
        raise TraceError("It is no list of token, layer, expert ids.")
    for number, row in enumerate(rows, 1):
        try:
            if isinstance(row, dict):
                ids = next(row[name] for name in IDS if name in row)
                token, layer = row["token"], row["layer"]
            else:
                token, layer, ids = row[0], row[1], row[2] if len(row) == 3 else row[2:]
            yield int(token), int(layer), [int(e) for e in (ids if isinstance(ids, list) else [ids])]
        except (KeyError, StopIteration, TypeError, ValueError, IndexError, OverflowError):
            raise TraceError(f"Entry {number} is not token, layer, expert ids: {json.dumps(row)[:80]}.") from None


def _listed(path: Path, rows: Iterable[Row], experts: int) -> ArrayTrace:
    """Tokens in the order in which they appear; layers by number. Where a layer of a token has fewer experts than the
    most there are, its first one is repeated, which asks for nothing new."""
    found: dict[int, dict[int, list[int]]] = {}
    for token, layer, ids in rows:
        found.setdefault(token, {}).setdefault(layer, []).extend(ids)
    layers = sorted({layer for by_layer in found.values() for layer in by_layer})
    if not found:
        raise TraceError(f"{path} has no rows.")
    for token, by_layer in found.items():
        if missing := [layer for layer in layers if not by_layer.get(layer)]:
            raise TraceError(f"{path} has no experts for token {token} in layer {missing[0]}.")
    k = max(len(ids) for by_layer in found.values() for ids in by_layer.values())
    array: Any = np.array([[ids + ids[:1] * (k - len(ids)) for ids in (by_layer[layer] for layer in layers)]
                           for by_layer in found.values()], np.int64)
    count = _experts(path, int(array.min()), int(array.max()), experts)
    return ArrayTrace(array.astype(id_type(count)), count)
