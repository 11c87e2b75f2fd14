"""Codes as 8-bit integers, and the order in which a row of x is stored so that they meet it without being moved.

A vector has 32 bytes of codes. Those of `bits` bits are read by shifting it: shift s gives the codes of inputs s, s +
per_byte, s + 2 * per_byte ... A row of x is stored in that order: for each vector of codes its first inputs, then its
second ones.
"""

from typing import NamedTuple

from core.memory.codec.bits import PLANES
from core.memory.codec.matrix import Matrix
from core.memory.codec.tables import TABLES

VECTOR = 32  # bytes, on every CPU: wider ones would change no bit, and few products are limited by their width
LANES = 8  # accumulators of a sum, and blocks that are added up at once
LEVELS = 127  # largest integer that a number of x is rounded to
MOST = 32767  # of 16-bit sums
UNITS = {"mxfp4": 2.0, "iq4_nl": 1.0, "nf4": 127.0}  # the integer that stands for 1.0 in a table
LINE = 64  # bytes: alignment of the parts of a row of x


class Plane(NamedTuple):
    """Codes of `bits` bits, the lowest first, at byte `at` of a slot; their integers count `weight` times."""

    bits: int
    weight: int
    at: int

    @property
    def per_byte(self) -> int:
        return 8 // self.bits


class Meaning(NamedTuple):
    """The integers of codes: the sum over planes of weight * code - offset, or entries[code] - offset, times `factor`.
    Integers before the offset is subtracted are unsigned up to `most`; `most` = 0: signed."""

    planes: tuple[Plane, ...]
    entries: tuple[int, ...]
    offset: int
    most: int
    factor: float


def meaning(matrix: Matrix) -> Meaning:
    """What a matrix's codes stand for. nf4's values are rounded to 1 / 127 of the largest; all others are exact."""
    at = matrix.codes.at
    if matrix.table:
        entries = tuple(round(value * UNITS[matrix.table]) for value in TABLES[matrix.table])
        factor, least = 1 / UNITS[matrix.table], min(entries)
        if max(entries) - least <= MOST // (2 * LEVELS * 4):  # four products are summed in 16 bits
            return Meaning((Plane(4, 1, at),), tuple(e - least for e in entries), -least, max(entries) - least, factor)
        return Meaning((Plane(4, 1, at),), entries, 0, 0, factor)
    if matrix.bits == 8:
        return Meaning((Plane(8, 1, at),), (), 0, 0, 1.0)
    low, *above = PLANES[matrix.bits]
    planes = [Plane(low, 1, at)]
    if above:
        assert matrix.high is not None
        planes.append(Plane(above[0], 1 << low, matrix.high.at))
    return Meaning(tuple(planes), (), matrix.offset, (1 << matrix.bits) - 1, 1.0)


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
        self.inputs = matrix.inputs
        self.count = matrix.inputs // self.size
        self.steps = -(-self.count // LANES)
        self.bytes = 0
        self.numbers = tuple(self._take(self.steps * LANES * self.size) for _ in self.planes)  # int8, for each plane
        self.scales = self._take(self.steps * LANES * 4)  # fp32 of each block
        self.sums = self._take(self.steps * LANES * 4)  # int32: of its integers
        self.scaled_sums = self._take(self.steps * LANES * 4)  # fp32: the same times the scale

    def _take(self, size: int) -> int:
        start = self.bytes
        self.bytes += -(-size // LINE) * LINE
        return start

    def vectors(self, plane: Plane) -> int:
        """Vectors of codes for LANES blocks."""
        return LANES * self.size * plane.bits // 8 // VECTOR

    def unit(self) -> int:
        """Blocks whose codes fill whole vectors of every plane."""
        return max(max(1, VECTOR * plane.per_byte // self.size) for plane in self.planes)

    def place(self, plane: Plane, block: int, shift: int) -> int:
        """Byte offset of a block's inputs of one shift, from the start of its plane's numbers; they are consecutive
        where the codes of a block fit a vector."""
        first = block * self.size * plane.bits // 8  # byte of codes
        return (first // VECTOR * plane.per_byte + shift) * VECTOR + first % VECTOR
