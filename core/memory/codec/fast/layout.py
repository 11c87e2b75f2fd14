"""Codes as 8-bit integers, and the order in which a row of x is stored so that they meet it without being moved.

A vector has 32 bytes of codes. Those of `bits` bits are read by shifting it: shift s gives the codes of inputs s, s +
per_byte, s + 2 * per_byte ... A row of x is stored in that order: for each vector of codes its first inputs, then its
second ones. Bits of a code that are stored apart are spread to the same bytes and join it before it is multiplied.
"""

from typing import NamedTuple

from core.memory.codec.bits import PLANES
from core.memory.codec.matrix import Matrix
from core.memory.codec.tables import TABLES, UNITS

VECTOR = 32  # bytes, on every CPU: wider ones would change no bit, and few products are limited by their width
LANES = 8  # accumulators of a sum, and blocks that are added up at once
LEVELS = 127  # largest integer that a number of x is rounded to
MOST = 32767  # of 16-bit sums
LINE = 64  # bytes: alignment of the parts of a row of x


class Plane(NamedTuple):
    """Bits of codes, `bits` of each, the lowest first, at byte `at` of a slot."""

    bits: int
    at: int

    @property
    def per_byte(self) -> int:
        return 8 // self.bits


class Meaning(NamedTuple):
    """The integers of codes: code - offset, or entries[code] - offset, times `factor`. Integers before the offset is
    subtracted are unsigned up to `most`; `most` = 0: signed. Planes: the lowest bits, and those above them if any."""

    planes: tuple[Plane, ...]
    entries: tuple[int, ...]
    offset: int
    most: int
    factor: float


def meaning(matrix: Matrix) -> Meaning:
    """What a matrix's codes stand for. nf4's values are rounded to 1 / 127 of the largest; all others are exact."""
    parts = zip(PLANES[matrix.bits], (matrix.codes, matrix.high), strict=False)
    planes = tuple(Plane(bits, part.at) for bits, part in parts if part is not None)
    if matrix.table:
        entries = tuple(round(value * UNITS[matrix.table]) for value in TABLES[matrix.table])
        factor, least = 1 / UNITS[matrix.table], min(entries)
        if max(entries) - least <= MOST // (2 * LEVELS * 4):  # four products are summed in 16 bits
            return Meaning(planes, tuple(e - least for e in entries), -least, max(entries) - least, factor)
        return Meaning(planes, entries, 0, 0, factor)
    if matrix.bits == 8:
        return Meaning(planes, (), 0, 0, 1.0)
    return Meaning(planes, (), matrix.offset, (1 << matrix.bits) - 1, 1.0)


def block_of(matrix: Matrix) -> int:
    """Inputs of a block."""
    if matrix.group:
        return min(matrix.group, 64)
    return 32 if matrix.inputs % 64 else 64


class Blocks:
    """How a row of `inputs` numbers is divided and stored: `count` blocks of `size`, in `steps` of LANES blocks, the
    last of which may be filled up with zeros."""

    def __init__(self, matrix: Matrix) -> None:
        self.size = block_of(matrix)
        self.planes = meaning(matrix).planes
        self.low = self.planes[0]
        self.inputs = matrix.inputs
        self.count = matrix.inputs // self.size
        self.steps = -(-self.count // LANES)
        self.bytes = 0
        self.numbers = self._take(self.steps * LANES * self.size)  # int8
        self.scales = self._take(self.steps * LANES * 4)  # fp32 of each block
        self.sums = self._take(self.steps * LANES * 4)  # int32: of its integers
        self.scaled_sums = self._take(self.steps * LANES * 4)  # fp32: the same times the scale

    def _take(self, size: int) -> int:
        start = self.bytes
        self.bytes += -(-size // LINE) * LINE
        return start

    @property
    def vectors(self) -> int:
        """Vectors of codes for LANES blocks."""
        return LANES * self.size * self.low.bits // 8 // VECTOR

    @property
    def unit(self) -> int:
        """Blocks whose codes fill whole vectors."""
        return max(1, VECTOR * self.low.per_byte // self.size)

    def share(self, plane: Plane, low_bytes: int) -> int:
        """Bytes of a plane for the codes of so many bytes of the lowest one."""
        return low_bytes * plane.bits // self.low.bits

    def place(self, block: int, shift: int) -> int:
        """Byte offset of a block's inputs of one shift, from the start of the numbers; they are consecutive where the
        codes of a block fit a vector."""
        first = block * self.size * self.low.bits // 8  # byte of codes
        return (first // VECTOR * self.low.per_byte + shift) * VECTOR + first % VECTOR
