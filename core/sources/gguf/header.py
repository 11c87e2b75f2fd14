"""The GGUF container: metadata, and where each tensor lies. Read with plain positioned reads, no memory map.

Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little-endian).
"""

from __future__ import annotations

import functools
import math
import struct
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from core.errors import ModelError

SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
VERSIONS = (2, 3)
ALIGNMENT = 32
MOST_DIMENSIONS = 4


class Entry(NamedTuple):
    """One stored tensor. `shape` in torch's order, slowest dimension first; `offset` in bytes from the file's start."""

    file: int
    type: str                        # ggml's name of the number type: "Q4_K", "F32"
    shape: tuple[int, ...]
    offset: int
    bytes: int


class Header(NamedTuple):
    """What a GGUF file says before its weights."""

    metadata: dict[str, Any]         # strings, numbers, booleans, lists
    tensors: dict[str, Entry]


def gguf_package() -> Any:
    """The `gguf` package. Raises ModelError that names it when it is missing."""
    try:
        import gguf
    except ImportError:
        raise ModelError("Reading GGUF files needs the package `gguf`. Install it (pip install gguf) and try again."
                         ) from None
    return gguf


@functools.cache
def number_types() -> dict[int, tuple[str, int, int]]:
    """ggml's number types by id: (name, weights a block, bytes a block), as the gguf package knows them."""
    return {int(kind): (kind.name, *sizes) for kind, sizes in gguf_package().GGML_QUANT_SIZES.items()}


def read_header(path: Path, file: int = 0) -> Header:
    """Read one file's header; `file` is its number within a split model. Raises ModelError when the file is not GGUF,
    is cut short, or holds number types that the installed gguf package does not know."""
    try:
        with path.open("rb") as handle:
            return _Parser(handle, path, file).header()
    except (OSError, struct.error, UnicodeDecodeError, ValueError, OverflowError) as error:
        raise _damaged(path, str(error)) from None


def _damaged(path: Path, why: str) -> ModelError:
    return ModelError(f"{path} is damaged: {why}. Download it again.")


class _Parser:
    def __init__(self, handle: BinaryIO, path: Path, file: int) -> None:
        self._handle, self._path, self._file = handle, path, file
        self._size = path.stat().st_size
        self._at = 0  # asking the file each time would take longer than reading

    def header(self) -> Header:
        if self._take(4) != b"GGUF":
            raise ModelError(f"{self._path} is not a GGUF file: it does not begin with GGUF. Give a .gguf file, or a "
                             "model directory.")
        version = self._number("I")
        if version & 0xFFFF == 0:
            raise ModelError(f"{self._path} is a GGUF file for big-endian machines, which Moestro does not read. "
                             "Download the usual one.")
        if version not in VERSIONS:
            raise ModelError(f"{self._path} is GGUF version {version}; Moestro reads versions 2 and 3. Download a "
                             "newer conversion of the model.")
        tensors, entries = self._number("Q"), self._number("Q")
        metadata: dict[str, Any] = {}
        for _ in range(entries):
            key = self._string()
            metadata[key] = self._value(self._number("I"))
        table = [self._tensor() for _ in range(tensors)]
        alignment = metadata.get("general.alignment", ALIGNMENT)
        if not isinstance(alignment, int) or alignment <= 0:
            raise ValueError(f"its alignment is {alignment!r}")
        start = -(-self._at // alignment) * alignment
        return Header(metadata, dict(self._entry(*row, start) for row in table))

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name, dimensions = self._string(), self._number("I")
        if not 1 <= dimensions <= MOST_DIMENSIONS:
            raise ValueError(f"tensor {name!r} has {dimensions} dimensions")
        shape = struct.unpack(f"<{dimensions}Q", self._take(8 * dimensions))
        return name, tuple(reversed(shape)), self._number("I"), self._number("Q")

    def _entry(self, name: str, shape: tuple[int, ...], kind: int, offset: int, start: int) -> tuple[str, Entry]:
        known = number_types().get(kind)
        if known is None:
            raise ModelError(f"{self._path} stores {name!r} in number type {kind}, which the installed package `gguf` "
                             "does not know. Update it (pip install -U gguf), or use another quantization.")
        type_name, weights, size = known
        if shape[-1] % weights:
            raise ValueError(f"rows of {name!r} are {shape[-1]} long, not a multiple of {weights} ({type_name})")
        entry = Entry(self._file, type_name, shape, start + offset, math.prod(shape) // weights * size)
        if entry.offset + entry.bytes > self._size:
            raise ValueError(f"it has {self._size:,} bytes, but {name!r} ends at {entry.offset + entry.bytes:,}")
        return name, entry

    def _take(self, count: int) -> bytes:
        self._at += count
        if self._at > self._size:
            raise ValueError("its header is cut short")
        return self._handle.read(count)

    def _number(self, code: str) -> Any:
        return struct.unpack("<" + code, self._take(struct.calcsize("<" + code)))[0]

    def _string(self) -> str:
        return self._take(int.from_bytes(self._take(8), "little")).decode("utf-8", "replace")

    def _value(self, kind: int) -> Any:
        if kind in SCALARS:
            return self._number(SCALARS[kind])
        if kind == STRING:
            return self._string()
        if kind != ARRAY:
            raise ValueError(f"its metadata has a value of type {kind}")
        inner, count = self._number("I"), self._number("Q")
        if inner in SCALARS:
            code = SCALARS[inner]
            return list(struct.unpack(f"<{count}{code}", self._take(count * struct.calcsize("<" + code))))
        if inner != STRING:
            raise ValueError(f"its metadata has an array of type {inner}")
        return [self._string() for _ in range(count)]
