"""What a kernel has to know of a matrix in a slot, as one compile-time constant. Importing this module needs triton."""

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import triton.language as tl

from core.memory.codec.bits import PLANES
from core.memory.codec.fast.gpu.integers import finding, keeping, moving
from core.memory.codec.fast.layout import block_of, meaning
from core.memory.codec.matrix import Matrix, Part

NUMBERS: dict[torch.dtype, Any] = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.uint8: tl.uint8,
    torch.int8: tl.int8,
    torch.float8_e4m3fn: tl.float8e4nv,
}
WIDE = 4  # words of a thread's loads: 16 bytes
THREADS = 32  # of a warp
LANES = 8  # accumulators


@dataclass(frozen=True)
class Form:
    """A matrix [outputs, inputs] at fixed places of a slot. `bits` 0 = plain numbers of the type `stored`.

    Codes are read as words of 32 bits, each of `per_word` codes, the lowest bits first. Shift k of a word has four of
    them, those of inputs k * `apart` + i * `beside`, i < 4: a prepared row of x has a word of these inputs for each
    word and shift.
    """

    outputs: int
    inputs: int
    transposed: bool
    bits: int
    stored: Any
    group: int
    size: int  # inputs of a block
    table: tuple[int, ...]  # its entries, four in an int32; () = evenly spaced
    offset: int
    factor: float
    scale: Any  # number types; None = absent
    zero: Any
    row: Any
    bias: Any
    wide: int  # inputs whose scales and zeros are multiplied by the same numbers of `row`; 0: that is of whole rows
    codes_at: int  # bytes from the start of a slot
    high_at: int
    scale_at: int
    zero_at: int
    row_at: int
    bias_at: int

    @property
    def plane(self) -> int:
        """Bits of a code in a word."""
        return PLANES[self.bits][0]

    @property
    def high(self) -> int:
        """Bits of a code that are stored apart."""
        return self.bits - self.plane

    @property
    def above(self) -> Any:
        """The number that has those of a word's codes."""
        return tl.uint8 if self.high * self.per_word == 8 else tl.uint16

    @property
    def per_word(self) -> int:
        return 32 // self.plane

    @property
    def shifts(self) -> int:
        return 8 // self.plane

    @property
    def has_table(self) -> bool:
        return bool(self.table)

    @property
    def in_digits(self) -> bool:
        """Whether codes choose entries of a table as they are, four in 16 bits."""
        return self.has_table and self.bits == 4

    @property
    def apart(self) -> int:
        return 4 if self.in_digits else 1

    @property
    def beside(self) -> int:
        return 1 if self.in_digits else self.shifts

    @property
    def words(self) -> int:
        """Of a block of codes."""
        return self.size // self.per_word

    @property
    def row_words(self) -> int:
        """Of a row of codes."""
        return self.inputs // self.per_word

    @property
    def blocks(self) -> int:
        return self.inputs // self.size

    @property
    def block_bytes(self) -> int:
        """Of a block of codes, without the bits that are stored apart."""
        return self.size * self.plane // 8

    @property
    def steps(self) -> tuple[int, ...]:
        """Bits, whose sums are how far codes of a word are shifted."""
        return {2: (4, 2), 4: (4,), 8: ()}[self.plane]

    @property
    def high_steps(self) -> tuple[int, ...]:
        """The same of the bits that are stored apart."""
        return {0: (), 1: (4, 2, 1), 2: (4, 2)}[self.high]

    @property
    def moving(self) -> tuple[str, ...]:
        """Instructions for each of the `steps`."""
        return tuple(map(moving, self.steps))

    @property
    def high_moving(self) -> tuple[str, ...]:
        return tuple(map(moving, self.high_steps))

    @property
    def keeping(self) -> tuple[str, str]:
        """Instructions that leave one code of a byte, and the bits above it."""
        return keeping((1 << self.plane) - 1), keeping((1 << self.high) - 1)

    @property
    def finding(self) -> str:
        """Instructions that find entries of the table."""
        return finding(self.table) if self.table else ""

    @property
    def prepared(self) -> int:
        """Words of a prepared row of x: four integers each; of each block its scale, the sum of its integers, and the
        same times the scale. A multiple of WIDE."""
        return -(-(self.inputs // 4 + 3 * self.blocks) // WIDE) * WIDE

    @property
    def across(self) -> int:
        """Rows of the matrix that the threads of a warp share, next to each other."""
        return THREADS * WIDE // (LANES * max(self.words, 2)) if self.bits else THREADS // LANES

    @property
    def together(self) -> int:
        """Rows of x that a program multiplies at once, where there are several."""
        if self.has_table and self.bits and self.high and self.words > 1:  # what is looked up takes many registers
            return 1
        return 2 if self.bits and (self.plane == 2 or self.row is not None) else 4

    @property
    def deep(self) -> int:
        """Rows of the matrix that a thread has at once."""
        return 2 if self.bits and (self.plane == 2 or self.words == 2) else 4

    @property
    def of_x(self) -> tuple[object, ...]:
        """What a row of x is prepared by: alike for alike matrices."""
        return self.inputs, self.bits, self.size, self.in_digits


@dataclass(frozen=True)
class Ways:
    """Of preparing a row of x: as each of these forms takes it, the words of one behind those of another."""

    forms: tuple[Form, ...]

    @property
    def count(self) -> int:
        return len(self.forms)

    @property
    def begins(self) -> tuple[int, ...]:
        return tuple(accumulate((one.prepared for one in self.forms), initial=0))


@dataclass(frozen=True)
class Joined:
    """Matrices by the same rows of x: the results of each begin at one of `columns`."""

    forms: tuple[Form, ...]
    columns: tuple[int, ...]
    tile: int = 0  # rows of a matrix of a program; 0: as many as the threads of a warp have at once

    @property
    def count(self) -> int:
        return len(self.forms)

    @property
    def starts(self) -> tuple[int, ...]:
        """The first program of each matrix, and the one after the last."""
        each = (-(-one.outputs // (self.tile or one.deep * one.across)) for one in self.forms)
        return tuple(accumulate(each, initial=0))

    @property
    def programs(self) -> int:
        return self.starts[-1]


def form(matrix: Matrix) -> Form:
    """The `Form` of a matrix."""
    meant, high = meaning(matrix) if matrix.bits else None, matrix.high
    entries = [] if meant is None else [entry & 255 for entry in meant.entries]
    words = [int.from_bytes(bytes(entries[i : i + 4]), "little", signed=True) for i in range(0, len(entries), 4)]

    def at(part: Part | None) -> int:
        return 0 if part is None else part.at

    def number(part: Part | None) -> Any:
        return None if part is None else NUMBERS[part.dtype]

    return Form(
        matrix.outputs,
        matrix.inputs,
        matrix.transposed,
        matrix.bits,
        None if matrix.bits else number(matrix.codes),
        matrix.group,
        block_of(matrix) if matrix.bits else LANES,
        tuple(words),
        meant.offset if meant is not None else 0,
        meant.factor if meant is not None else 1.0,
        number(matrix.scale),
        number(matrix.zero),
        number(matrix.row),
        number(matrix.bias),
        matrix.wide,
        matrix.codes.at,
        at(high),
        at(matrix.scale),
        at(matrix.zero),
        at(matrix.row),
        at(matrix.bias),
    )
