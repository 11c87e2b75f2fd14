"""The GGUF container: metadata and tensor locations. Reads the file in order, without a memory map.

Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little-endian). As in llama.cpp's
own reader (ggml/src/gguf.cpp), keys and tensors are unique, tensors are consecutive in the order of their table, and
the alignment is a power of two. Nothing may follow the last tensor: otherwise a table with a missing row would shift
every weight. Needs the package `gguf` for number types only.
"""

import functools
import math
import struct
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from core.errors import ModelError
from core.system.reading import open_regular, shown

SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
VERSIONS = (2, 3)
ALIGNMENT = 32
MOST_DIMENSIONS = 4
KEY_BYTES = 8 + 4 + 1  # minimum size of a key and its value ...
TENSOR_BYTES = 8 + 4 + 8 + 4 + 8  # ... and of a row of the tensor table
MOST_NAME = 1 << 12  # bytes of a key or of a tensor's name
MOST_KEYS = 1 << 20
MOST_VALUES = 1 << 23  # elements of an array: vocabularies have under 2 ** 20 tokens
MOST_TEXTS = 1 << 22  # texts in all arrays together: tokens, and as many merges
LONGEST_KEPT = 1000  # bytes of a text that `read_metadata` returns; templates are longer
HEADER_LIMIT = 512 << 20  # bytes before the weights
MOST_ALIGNMENT = 1 << 24


class TensorInfo(NamedTuple):
    """One stored tensor. `shape` in torch's order, slowest dimension first; `offset` in bytes from the file's start."""

    file: int
    type: str  # ggml's name of the number type: "Q4_K", "F32"
    shape: tuple[int, ...]
    offset: int
    bytes: int


class Header(NamedTuple):
    """The content of a GGUF file before its weights."""

    metadata: dict[str, Any]  # strings, numbers, booleans, lists
    tensors: dict[str, TensorInfo]


def gguf_package() -> Any:
    """The `gguf` package. Raises ModelError that names it when it is missing."""
    try:
        import gguf
    except ImportError:
        raise ModelError(
            "Reading GGUF files needs the package `gguf`. Install it (pip install gguf) and try again."
        ) from None
    return gguf


@functools.cache
def number_types() -> dict[int, tuple[str, int, int]]:
    """ggml's number types by id: (name, weights per block, bytes per block), from the gguf package."""
    return {int(kind): (kind.name, *sizes) for kind, sizes in gguf_package().GGML_QUANT_SIZES.items()}


def read_header(path: Path, file: int = 0) -> Header:
    """Read one file's header; `file` is its number within a split model. Raises ModelError when the file is not GGUF,
    is truncated, or has number types that the installed gguf package does not know."""
    try:
        with open_regular(path) as handle:
            return _Parser(handle, path, file).header()
    except (OSError, struct.error, ValueError, OverflowError) as error:
        raise damaged(path, str(error)) from None


def read_metadata(path: Path) -> dict[str, Any]:
    """The numbers and short texts in one file's metadata, without its arrays and texts above LONGEST_KEPT bytes. Takes
    little memory, and reads nothing that follows the metadata. Raises ModelError when the file is not GGUF, or when
    its metadata is damaged."""
    try:
        with open_regular(path) as handle:
            return _Parser(handle, path, 0, brief=True).metadata()[1]
    except (OSError, struct.error, ValueError, OverflowError) as error:
        raise damaged(path, str(error)) from None


def file_type(number: object) -> str:
    """llama.cpp's name of a quantisation: "Q4_K_M" for 15."""
    try:
        return str(gguf_package().LlamaFileType(number).name).removeprefix("MOSTLY_").removeprefix("ALL_")
    except ValueError:
        return f"type {number}"


def damaged(path: Path | str, why: str) -> ModelError:
    """The error for an inconsistent GGUF file; `why` follows "is damaged: "."""
    return ModelError(f"{shown(path)} is damaged: {why}. Download it again.")


def padded(count: int, alignment: int) -> int:
    """The next multiple of the alignment."""
    return -(-count // alignment) * alignment


Row = tuple[str, tuple[int, ...], int, int]
"""A row of the table of tensors: name, shape, number type, bytes from where the weights begin."""


class _Parser:
    """Reads a header in order. `brief`: arrays and long texts are skipped, and left out of the metadata."""

    def __init__(self, handle: BinaryIO, path: Path, file: int, brief: bool = False) -> None:
        self._handle, self._path, self._file, self._brief = handle, path, file, brief
        self._size = path.stat().st_size
        self._end = min(self._size, HEADER_LIMIT)
        self._at = 0  # tracked here: tell() would take longer than reading
        self._texts = 0  # in arrays so far

    def metadata(self) -> tuple[int, dict[str, Any]]:
        """The number of tensors, and the metadata."""
        if self._take(4) != b"GGUF":
            raise ModelError(
                f"{self._path} is not a GGUF file: it does not begin with GGUF. Give a .gguf file, or a "
                "model directory."
            )
        version = self._number("I")
        if version & 0xFFFF == 0:
            raise ModelError(
                f"{self._path} is a GGUF file for big-endian machines, which Moestro does not read. "
                "Download the usual one."
            )
        if version not in VERSIONS:
            raise ModelError(
                f"{self._path} is GGUF version {version}; Moestro reads versions 2 and 3. Download a "
                "newer conversion of the model."
            )
        tensors, entries = self._count("tensors", TENSOR_BYTES), self._count("settings", KEY_BYTES)
        if entries > MOST_KEYS:
            raise ValueError(f"it says that it has {entries:,} settings")
        metadata: dict[str, Any] = {}
        for _ in range(entries):
            key = self._name()
            if key in metadata:
                raise ValueError(f"it says {key!r} twice")
            metadata[key] = self._value(self._number("I"))
        return tensors, {key: value for key, value in metadata.items() if value is not None}

    def header(self) -> Header:
        """The metadata, and the checked places of the tensors."""
        tensors, metadata = self.metadata()
        table = [self._tensor() for _ in range(tensors)]
        alignment = metadata.get("general.alignment", ALIGNMENT)
        if type(alignment) is not int or not 0 < alignment <= MOST_ALIGNMENT or alignment & (alignment - 1):
            raise ValueError(f"its alignment is {alignment!r:.40}, which is not a power of two")
        return Header(metadata, self._placed(table, alignment))

    def _placed(self, table: list[Row], alignment: int) -> dict[str, TensorInfo]:
        """Tensors by name, each starting where the previous one ends. Raises ValueError for any other order, for
        overlaps and gaps, and when the file's size differs."""
        start = padded(self._at, alignment)
        found: dict[str, TensorInfo] = {}
        at, end = 0, self._at
        for name, shape, kind, offset in table:
            entry = self._entry(name, shape, kind, start + offset)
            if name in found:
                raise ValueError(f"it has the tensor {name!r} twice")
            if offset != at:
                raise ValueError(f"{name!r} should begin at byte {at:,} of its weights, but its header says {offset:,}")
            found[name], end = entry, entry.offset + entry.bytes
            at = padded(offset + entry.bytes, alignment)
        if self._size > start + at:
            raise ValueError(f"it has {self._size:,} bytes, but its last tensor ends at {end:,}")
        return found

    def _tensor(self) -> Row:
        name, dimensions = self._name(), self._number("I")
        if not 1 <= dimensions <= MOST_DIMENSIONS:
            raise ValueError(f"tensor {name!r} has {dimensions} dimensions")
        shape = struct.unpack(f"<{dimensions}Q", self._take(8 * dimensions))
        if not all(shape):
            raise ValueError(f"tensor {name!r} has a dimension of 0")
        return name, tuple(reversed(shape)), self._number("I"), self._number("Q")

    def _entry(self, name: str, shape: tuple[int, ...], kind: int, offset: int) -> TensorInfo:
        known = number_types().get(kind)
        if known is None:
            raise ModelError(
                f"{self._path} stores {name!r} in number type {kind}, which the installed package `gguf` "
                "does not know. Update it (pip install -U gguf), or use another quantization."
            )
        type_name, weights, size = known
        if shape[-1] % weights:
            raise ValueError(f"rows of {name!r} are {shape[-1]} long, not a multiple of {weights} ({type_name})")
        entry = TensorInfo(self._file, type_name, shape, offset, math.prod(shape) // weights * size)
        if entry.offset + entry.bytes > self._size:
            raise ValueError(f"it has {self._size:,} bytes, but {name!r} ends at {entry.offset + entry.bytes:,}")
        return entry

    def _take(self, count: int) -> bytes:
        self._advance(count)
        return self._handle.read(count)

    def _skip(self, count: int) -> None:
        self._advance(count)
        self._handle.seek(self._at)

    def _advance(self, count: int) -> None:
        self._at += count
        if self._at > self._size:
            raise ValueError("its header is cut short")
        if self._at > HEADER_LIMIT:
            raise ValueError(f"its header has more than {HEADER_LIMIT:,} bytes")

    def _count(self, of: str, each: int) -> int:
        """Number of tensors or settings; at most what fits into the file."""
        count: int = self._number("Q")
        if count * each > self._end:
            raise ValueError(f"it says that it has {count:,} {of}, for which it is too small")
        return count

    def _name(self) -> str:
        length = int.from_bytes(self._take(8), "little")
        if MOST_NAME < length <= self._size - self._at:
            raise ValueError(f"its header has a name of {length:,} bytes")
        return self._take(length).decode("utf-8")

    def _number(self, code: str) -> Any:
        return struct.unpack("<" + code, self._take(struct.calcsize("<" + code)))[0]

    def _string(self) -> str:
        return self._take(self._length()).decode("utf-8", "replace")

    def _length(self) -> int:
        return int.from_bytes(self._take(8), "little")

    def _short_string(self) -> str | None:
        length = self._length()
        if length > LONGEST_KEPT:
            self._skip(length)
            return None
        return self._take(length).decode("utf-8", "replace")

    def _skip_array(self, inner: int, count: int) -> None:
        if inner in SCALARS:
            self._skip(count * struct.calcsize("<" + SCALARS[inner]))
            return
        read, seek, at = self._handle.read, self._handle.seek, self._at
        for _ in range(count):  # hundreds of thousands
            at += 8 + int.from_bytes(read(8), "little")
            if at > self._end:
                break
            seek(at)
        self._skip(at - self._at)

    def _value(self, kind: int) -> Any:
        if kind in SCALARS:
            return self._number(SCALARS[kind])
        if kind == STRING:
            return self._short_string() if self._brief else self._string()
        if kind != ARRAY:
            raise ValueError(f"its metadata has a value of type {kind}")
        inner, count = self._number("I"), self._number("Q")
        if count > MOST_VALUES:
            raise ValueError(f"its metadata has an array of {count:,} values")
        if inner not in SCALARS and inner != STRING:
            raise ValueError(f"its metadata has an array of type {inner}")
        self._texts += count * (inner == STRING)
        if self._texts > MOST_TEXTS:
            raise ValueError(f"its metadata has arrays of more than {MOST_TEXTS:,} texts")
        if self._brief:
            self._skip_array(inner, count)
            return None
        if inner in SCALARS:
            code = SCALARS[inner]
            return list(struct.unpack(f"<{count}{code}", self._take(count * struct.calcsize("<" + code))))
        return [self._string() for _ in range(count)]
