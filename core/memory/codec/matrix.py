"""Byte positions of one matrix in a slot, for kernels that compute directly from slots."""

from typing import NamedTuple

import torch

from core.memory.codec.base import Base


class Part(NamedTuple):
    """Numbers in a slot: byte offset from its start, and their type."""

    at: int
    dtype: torch.dtype


class Matrix(NamedTuple):
    """One matrix of an expert in a slot: [outputs, inputs], or plain numbers [inputs, outputs]. One that is cut along
    its inputs is in several slots, which have equal shares of each row."""

    outputs: int
    inputs: int
    transposed: bool  # plain numbers only
    bits: int  # 0 = plain numbers
    group: int  # inputs that share a scale; 0 = a whole row
    table: str  # name of the code values' table; "" = evenly spaced
    codes: Part  # or plain numbers
    high: Part | None  # bits above those of `codes`
    scale: Part | None
    zero: Part | None
    bias: Part | None  # in the compute dtype
    row: Part | None = None  # scales of rows, beside those of groups; or the numbers that `wide` inputs share
    blocks: int = 1  # of an expert, each in a slot of its own, that it is in
    wide: int = 0  # inputs whose integer scales are multiplied by one number, and zeros by the next one

    @property
    def own(self) -> int:
        """Inputs in one slot."""
        return self.inputs // self.blocks

    @property
    def share(self) -> "Matrix":
        """What one slot has of it."""
        return self._replace(inputs=self.own, blocks=1)

    @property
    def offset(self) -> int:
        """What is taken from a code."""
        return 0 if self.bits == 8 or self.table or (self.wide and self.zero is not None) else 1 << self.bits - 1

    @property
    def row_scale(self) -> Part | None:
        """What whole rows are multiplied by."""
        return None if self.wide else self.row if self.group else self.scale


def matrix(codec: Base, part: str) -> Matrix:
    """The `Matrix` of one part of a codec whose slots have the layout of its blobs."""
    form, (outputs, inputs) = codec.formats[part], codec.out_in(part)

    def find(name: str) -> Part | None:
        field = codec.slot_layout.fields.get(name)
        return None if field is None else Part(field.offset, field.dtype)

    codes = find(part if form.is_plain else f"{part}.q")
    assert codes is not None
    return Matrix(
        outputs,
        inputs,
        form.is_plain and codec.is_transposed,
        0 if form.is_plain else form.bits,
        form.group,
        form.table,
        codes,
        find(f"{part}.q1"),
        find(f"{part}.scale"),
        find(f"{part}.zero"),
        find(f"{part}_bias"),
        find(f"{part}.row"),
        wide=form.wide,
    )
