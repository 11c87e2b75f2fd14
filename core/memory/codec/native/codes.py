"""Codes as integers: the values of a format's codes before scales, and how a vector of codes is read."""

from typing import NamedTuple

from core.memory.codec.matrix import Matrix, Part
from core.memory.codec.native.states import CodeRun, Plane
from core.memory.codec.tables import INTEGERS, TABLES
from core.system.native import numbers
from core.system.native.ir import Code, splat, vector

SHUFFLE = {64: "llvm.x86.avx512.pshuf.b.512", 32: "llvm.x86.avx2.pshuf.b", 16: "llvm.x86.ssse3.pshuf.b.128"}


class Meaning(NamedTuple):
    """Values of codes, before scales: `entries[code]`, or the sum of the codes of all planes, times `factor`."""

    planes: tuple[Plane, ...]
    entries: tuple[int, ...]
    factor: float


def meaning(matrix: Matrix) -> Meaning:
    """The values of a matrix's codes. Tables of halves or integers are exact; nf4's are rounded to 2^-14 of the
    largest."""
    at = matrix.codes.at
    if matrix.table:
        per_one = INTEGERS[matrix.table]
        return Meaning((Plane(4, 0, 1, at),), tuple(round(v * per_one) for v in TABLES[matrix.table]), 1 / per_one)
    if matrix.high is not None:
        return Meaning((Plane(2, 4, 1, at), Plane(1, 0, 4, matrix.high.at)), (), 1.0)
    offset = 0 if matrix.bits == 8 else 1 << matrix.bits - 1
    return Meaning((Plane(matrix.bits, offset, 1, at),), (), 1.0)


def one(code: Code, slot: str, part: Part, row: str) -> str:
    """Load one number of a part of a slot as a float."""
    value = numbers.load(code, code.at(slot, part.at), row, 1, part.dtype)
    return code.first(value)


def read(code: Code, entries: tuple[int, ...], plane: Plane, run: CodeRun, place: str) -> list[str]:
    """Load the vector of codes at `place` as <words x i16>s: the first code of every word, the second ... Signed where
    codes have 8 bits or are looked up, else starting at 0."""
    count = run.words
    stored = run.bytes // 2
    words = code.load(f"<{stored} x i16>", place)
    words = code.padded("i16", words, stored, count)
    if entries:
        return _looked_up(code, entries, count, words)
    if plane.bits == 8:
        return [_signed(code, words, count, odd) for odd in (False, True)]
    found = []
    for s in range(plane.per_word):
        value = _shift(code, "lshr", words, count, s * plane.bits)
        last = s == plane.per_word - 1
        found.append(value if last else _and(code, value, count, (1 << plane.bits) - 1))
    return found


def _looked_up(code: Code, entries: tuple[int, ...], count: int, words: str) -> list[str]:
    """Look up 4-bit codes, two per byte, in a table of 8-bit or 16-bit values."""
    kind, size = f"<{count} x i16>", count * 2
    bytes_ = f"<{size} x i8>"
    planes = 1 if max(map(abs, entries)) < 128 else 2
    halves = []
    for shift in (0, 4):
        index = _and(code, _shift(code, "lshr", words, count, shift), count, 0x0F0F)
        index = code.let(f"bitcast {kind} {index} to {bytes_}")
        found = []
        for byte in range(planes):
            table = vector("i8", [entry >> 8 * byte & 255 for entry in entries] * (size // 16))
            one = code.call(bytes_, SHUFFLE[size], (bytes_, table), (bytes_, index))
            found.append(code.let(f"bitcast {bytes_} {one} to {kind}"))
        halves.append(found)
    if planes == 1:
        return [_signed(code, found[0], count, odd) for odd in (False, True) for found in halves]
    made = []
    for odd in (False, True):
        for low, high in halves:
            low = _shift(code, "lshr", low, count, 8) if odd else _and(code, low, count, 0xFF)
            high = _and(code, high, count, -0x100) if odd else _shift(code, "shl", high, count, 8)
            made.append(code.let(f"or {kind} {low}, {high}"))
    return made


def _signed(code: Code, words: str, count: int, odd: bool) -> str:
    """The even or odd bytes of words, sign-extended."""
    return _shift(code, "ashr", words if odd else _shift(code, "shl", words, count, 8), count, 8)


def _shift(code: Code, way: str, value: str, count: int, by: int) -> str:
    return code.let(f"{way} <{count} x i16> {value}, {splat('i16', count, by)}") if by else value


def _and(code: Code, value: str, count: int, mask: int) -> str:
    return code.let(f"and <{count} x i16> {value}, {splat('i16', count, mask)}")
