"""Safetensors files: validated headers, and tensors read one at a time.

Bytes are read with positioned reads into fresh buffers, never through a memory map, whose touched pages would count as
this process's memory.
"""

import math
import os
import threading
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open

from core.errors import ModelError
from core.memory.codec.coded import QuantizedTensor
from core.system.reading import BadJson, open_regular, parse_json, shown

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U32": torch.uint32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}
HEADER_BYTES = 100 << 20  # as in safetensors itself


class TensorLocation(NamedTuple):
    """Location of one tensor in a safetensors file; `offset` in bytes from the start of the file."""

    file: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    bytes: int


def read_header(file: Path) -> tuple[dict[str, Any], int]:
    """A safetensors header and the byte offset of the data. Raises ModelError when the file is truncated, when a tensor
    occurs twice, or when sizes, shapes and offsets contradict each other.

    Accepted files have also passed the safetensors library's own checks, so later opening cannot fail on the header.
    """
    with open_regular(file) as handle:
        size = os.fstat(handle.fileno()).st_size
        try:
            length = int.from_bytes(handle.read(8), "little")
            if not 2 <= length <= min(size - 8, HEADER_BYTES):
                raise BadJson("its header is cut short")
            header = parse_json(handle.read(length))
            if not isinstance(header, dict):
                raise BadJson("its header is not an object")
            header.pop("__metadata__", None)
            end = max((_end(name, entry) for name, entry in header.items()), default=0)
        except (BadJson, OSError) as error:
            raise _damaged(file, str(error)) from None
    if size != 8 + length + end:
        raise _damaged(file, f"it has {size:,} bytes, its header says {8 + length + end:,}")
    try:
        with safe_open(str(file), framework="pt"):
            pass
    except Exception as error:  # errors of the library and of the system
        raise _damaged(file, str(error)) from None
    return header, 8 + length


def _end(name: str, entry: Any) -> int:
    """End offset of a tensor. Raises BadJson unless its offsets, shape and number type give the same size."""
    entry = entry if isinstance(entry, dict) else {}
    dtype, shape, place = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    good = (
        isinstance(dtype, str)
        and all(
            isinstance(numbers, list) and all(type(n) is int and 0 <= n < 1 << 63 for n in numbers)
            for numbers in (shape, place)
        )
        and len(place) == 2
        and place[0] <= place[1]
    )
    if not good:
        raise BadJson(f"its header does not say where {name[:200]!r} is")
    if dtype in DTYPES and place[1] - place[0] != math.prod(shape) * DTYPES[dtype].itemsize:
        raise BadJson(f"{name!r} of shape {tuple(shape)} has {place[1] - place[0]:,} bytes")
    end: int = place[1]
    return end


def _damaged(file: Path, why: str) -> ModelError:
    return ModelError(f"{shown(file)} is damaged: {why}. Download it again.")


class TensorFiles:
    """Open safetensors files. `read` may be called from any thread; `close` releases the files (idempotent)."""

    def __init__(self, files: tuple[Path, ...]) -> None:
        self.tensors: dict[str, TensorLocation] = {}
        for number, file in enumerate(files):
            header, start = read_header(file)
            for name, entry in header.items():
                if entry["dtype"] not in DTYPES:
                    raise ModelError(f"{file} holds numbers of type {entry['dtype']}, which Moestro cannot read.")
                dtype, (begin, end), shape = DTYPES[entry["dtype"]], entry["data_offsets"], tuple(entry["shape"])
                self.tensors[name] = TensorLocation(number, dtype, shape, start + begin, end - begin)
        self._handles = [file.open("rb", buffering=0) for file in files]
        self._locks = [threading.Lock() for _ in files]

    def read(self, name: str, row: int | None = None) -> torch.Tensor:
        """A whole tensor, or `row` of its first dimension as [1, ...]: a new CPU tensor in the file's dtype."""
        at = self.tensors[name]
        shape, offset, count = at.shape, at.offset, at.bytes
        if row is not None:
            count //= shape[0]
            shape, offset = (1, *shape[1:]), offset + row * count
        raw = torch.empty(count, dtype=torch.uint8)
        buffer, done = memoryview(raw.numpy().data), 0
        with self._locks[at.file]:
            handle = self._handles[at.file]
            handle.seek(offset)
            while done < count:
                got = handle.readinto(buffer[done:])
                if not got:
                    raise ModelError(f"{handle.name} became shorter while it was read. Download it again.")
                done += got
        return raw.view(at.dtype).view(shape)

    def metadata(self) -> dict[str, str]:
        """What the files' headers say besides their tensors, of all files together."""
        found: dict[str, str] = {}
        for handle in self._handles:
            with safe_open(handle.name, framework="pt") as file:
                found |= file.metadata() or {}
        return found

    def stack(self, name: str, rows: int) -> None:
        """From now on present a matrix [n * rows, in] as a stack of n matrices [n, rows, in]; other shapes stay
        unchanged."""
        at = self.tensors[name]
        if len(at.shape) == 2 and at.shape[0] % rows == 0:
            self.tensors[name] = at._replace(shape=(at.shape[0] // rows, rows, at.shape[1]))

    def coded(self, name: str, row: int | None = None) -> QuantizedTensor | None:
        """None: these tensors are not quantised."""
        return None

    def close(self) -> None:
        for handle in self._handles:
            handle.close()
