"""Reads a GGUF header: the model's sizes and its quantisation. Reads no tensors.

The file format is that of the GGUF specification (ggml), versions 2 and 3, little-endian.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

from core.system.reading import open_regular

MAGIC = b"GGUF"
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
TEXT, ARRAY = 8, 9
MOST = 1 << 20  # header entries; more mean a damaged file
MOST_TEXTS = 1 << 22  # texts in lists; vocabularies have under 2 ** 20 tokens and as many merges
LONGEST_KEPT = 1000  # bytes of a kept text; longer ones, such as templates, are skipped


def read_head(file: Path) -> dict[str, object]:
    """The plain values of a GGUF header by key, without its arrays and long texts.

    Raises ValueError if the file is not GGUF, ModelError if it is no regular file, OSError.
    """
    with open_regular(file) as handle:
        if handle.read(4) != MAGIC:
            raise ValueError(f"{file.name} is not a GGUF file.")
        with mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                return _Reader(data).values()
            except (struct.error, LookupError, UnicodeDecodeError, OverflowError):
                raise ValueError(f"{file.name} is damaged, or its download is not finished.") from None


class _Reader:
    """Reads a header sequentially."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data, self._at = data, 4
        self._texts = 0  # texts in lists read so far

    def values(self) -> dict[str, object]:
        version, _, entries = self._take("I"), self._take("Q"), self._take("Q")
        if version not in (2, 3) or not isinstance(entries, int) or entries > MOST:
            raise ValueError(f"GGUF version {version} is not known here.")
        found: dict[str, object] = {}
        for _ in range(entries):
            key = self._text()
            value = self._value(int(self._take("I")))
            if value is not None:
                found[key] = value
        return found

    def _take(self, form: str) -> int:
        """One number (or truth value) of a struct format."""
        value: int
        (value,) = struct.unpack_from("<" + form, self._data, self._at)
        self._at += struct.calcsize("<" + form)
        return value

    def _text(self) -> str:
        length = self._take("Q")
        start, self._at = self._at, self._at + length
        if self._at > len(self._data):
            raise IndexError
        return self._data[start : self._at].decode("utf-8") if length <= LONGEST_KEPT else ""

    def _value(self, kind: int) -> object:
        if kind == TEXT:
            return self._text() or None
        if kind != ARRAY:
            return self._take(SCALARS[kind])
        of, count = self._take("I"), self._take("Q")
        if of == TEXT:
            self._texts += count
            if self._texts > MOST_TEXTS:
                raise IndexError
            for _ in range(count):
                self._skip_text()
        else:  # arrays of arrays, which no model has, have no known size
            self._at += count * struct.calcsize("<" + SCALARS[of])
            if self._at > len(self._data):
                raise IndexError
        return None

    def _skip_text(self) -> None:
        self._at += 8 + struct.unpack_from("<Q", self._data, self._at)[0]


def file_type(number: object) -> str:
    """llama.cpp's name of a quantisation: "Q4_K_M" for 15."""
    import gguf

    try:
        return str(gguf.LlamaFileType(number).name).removeprefix("MOSTLY_").removeprefix("ALL_")
    except ValueError:
        return f"type {number}"
