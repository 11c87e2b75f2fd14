"""Where the numbers of one matrix lie in a slot: what kernels that compute straight out of slots are made for."""

from __future__ import annotations

from typing import NamedTuple

import torch

from core.memory.codec.base import Base


class Part(NamedTuple):
    """Numbers in a slot: bytes from its start, and their type."""

    at: int
    dtype: torch.dtype


class Matrix(NamedTuple):
    """One matrix of an expert as slots hold it: [outputs, inputs], or plain numbers [inputs, outputs]."""

    outputs: int
    inputs: int
    transposed: bool  # of plain numbers only
    bits: int  # 0 = plain numbers
    group: int  # inputs that share a scale; 0 = a whole row
    table: str  # of the values that codes stand for; "" = evenly spaced
    codes: Part  # or plain numbers
    high: Part | None  # third bits
    scale: Part | None
    zero: Part | None
    bias: Part | None  # in the compute dtype


def matrix(codec: Base, part: str) -> Matrix:
    """A part of a codec's slots, which are laid out as its blobs are."""
    form, (outputs, inputs) = codec.format, codec.out_in(part)

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
    )
