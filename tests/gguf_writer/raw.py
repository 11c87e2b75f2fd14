"""A GGUF file taken apart, to be put together again wrongly: what no writer would write."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
U32, I32, F32, BOOL, TEXT, ARRAY, U64, F64 = 4, 5, 6, 7, 8, 9, 10, 12
NAN = float("nan")


@dataclass
class Row:
    """A tensor in the table. `shape` as GGUF has it, fastest dimension first."""

    name: bytes
    shape: tuple[int, ...]
    type: int
    offset: int


@dataclass
class Raw:
    """Everything as bytes: `pairs` has (key, type, the value's bytes)."""

    version: int
    pairs: list[tuple[bytes, int, bytes]]
    rows: list[Row]
    data: bytes
    counts: tuple[int | None, int | None] = (None, None)  # of tensors and pairs, where they are to be lies
    alignment: int = 32
    _at: int = field(default=0, repr=False)

    @classmethod
    def of(cls, file: Path) -> Raw:
        """Take a sound file apart."""
        raw, made = file.read_bytes(), cls(3, [], [], b"")
        _, made.version, tensors, pairs = struct.unpack_from("<4sIQQ", raw)
        made._at = 24
        for _ in range(pairs):
            key, kind = made._text(raw), made._number(raw, "I")
            begin = made._at
            made._skip(raw, kind)
            made.pairs.append((key, kind, raw[begin : made._at]))
        for _ in range(tensors):
            name, dims = made._text(raw), made._number(raw, "I")
            shape = tuple(made._number(raw, "Q") for _ in range(dims))
            made.rows.append(Row(name, shape, made._number(raw, "I"), made._number(raw, "Q")))
        made.data = raw[-(-made._at // 32) * 32 :]
        return made

    def write(self, file: Path) -> Path:
        """Put it together again."""
        tensors, pairs = (
            len(of) if lie is None else lie for of, lie in zip((self.rows, self.pairs), self.counts, strict=True)
        )
        head = struct.pack("<4sIQQ", b"GGUF", self.version, tensors, pairs)
        head += b"".join(text(key) + struct.pack("<I", kind) + value for key, kind, value in self.pairs)
        head += b"".join(
            text(r.name) + struct.pack(f"<I{len(r.shape)}QIQ", len(r.shape), *r.shape, r.type, r.offset)
            for r in self.rows
        )
        file.write_bytes(head + b"\0" * (-len(head) % self.alignment) + self.data)
        return file

    def set(self, key: str, kind: int, value: Any) -> None:
        """Give a key another value, or add it. `value` as a number or text, or bytes that are taken as they are."""
        packed = (
            value
            if isinstance(value, bytes)
            else text(value.encode())
            if kind == TEXT
            else struct.pack("<" + CODES[kind], value)
        )
        known = [k for k, *_ in self.pairs]
        entry = (key.encode(), kind, packed)
        if entry[0] in known:
            self.pairs[known.index(entry[0])] = entry
        else:
            self.pairs.append(entry)

    def row(self, name: str) -> Row:
        return next(r for r in self.rows if r.name == name.encode())

    def drop(self, name: str) -> None:
        """Remove a tensor and its weights; the others move up."""
        gone = self.row(name)
        later = [r.offset for r in self.rows if r.offset > gone.offset]
        end = min(later, default=len(self.data))
        self.data = self.data[: gone.offset] + self.data[end:]
        self.rows = [
            r if r.offset < gone.offset else replace(r, offset=r.offset - (end - gone.offset))
            for r in self.rows
            if r is not gone
        ]

    def _number(self, raw: bytes, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, raw, self._at)
        self._at += struct.calcsize("<" + code)
        return value

    def _text(self, raw: bytes) -> bytes:
        length = self._number(raw, "Q")
        self._at += length
        return raw[self._at - length : self._at]

    def _skip(self, raw: bytes, kind: int) -> None:
        if kind == TEXT:
            self._text(raw)
        elif kind == ARRAY:
            inner, count = self._number(raw, "I"), self._number(raw, "Q")
            for _ in range(count):
                self._skip(raw, inner)
        else:
            self._number(raw, CODES[kind])


def text(value: bytes) -> bytes:
    """As GGUF stores it."""
    return struct.pack("<Q", len(value)) + value


def array(kind: int, values: list[Any]) -> bytes:
    """An array's bytes."""
    inner = b"".join(text(v.encode()) if kind == TEXT else struct.pack("<" + CODES[kind], v) for v in values)
    return struct.pack("<IQ", kind, len(values)) + inner
