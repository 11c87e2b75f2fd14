"""Weights in fp32, `core.memory.codec.fast.unpack` in Triton. Importing this module needs triton."""

import triton
import triton.language as tl

from core.memory.codec.fast.gpu.floats import number


def _codes(slot: tl.tensor, at: tl.tensor, known: tl.tensor, PLACE: tl.constexpr, BITS: tl.constexpr) -> tl.tensor:
    """Codes of BITS bits, the lowest of a byte first, that begin PLACE bytes after the start of a slot."""
    byte = tl.load((slot + PLACE).to(tl.pointer_type(tl.uint8)) + at * BITS // 8, mask=known, other=0).to(tl.int32)
    return (byte >> (at * BITS % 8).to(tl.int32)) & ((1 << BITS) - 1)


codes_at = triton.jit(_codes)


def _shared(
    slot: tl.tensor,
    row: tl.tensor,
    k: tl.tensor,
    known: tl.tensor,
    PLACE: tl.constexpr,
    TYPE: tl.constexpr,
    SECOND: tl.constexpr,
    F: tl.constexpr,
) -> tl.tensor:
    """The scales or zeros (SECOND) of weights."""
    at = row + k * 0
    if F.group:
        at = row * (F.inputs // F.group) + k // F.group
    found = number(slot + PLACE + at * (TYPE.primitive_bitwidth // 8), known, TYPE)
    if F.wide:
        EACH: tl.constexpr = 1 if F.zero is None else 2
        at = (row * (F.inputs // F.wide) + k // F.wide) * EACH + SECOND
        found *= number(slot + F.row_at + at * (F.row.primitive_bitwidth // 8), known, F.row)
    return found


shared = triton.jit(_shared)


def _unpacked(
    slot: tl.tensor, table: tl.tensor, row: tl.tensor, k: tl.tensor, known: tl.tensor, F: tl.constexpr
) -> tl.tensor:
    """The weights of numbers k of rows, int64, of the matrix at an address, in fp32; 0 where not `known`. `table`: the
    sixteen numbers of codes, where these are not evenly spaced. F: core.memory.codec.fast.gpu.form.Form."""
    at = row * F.inputs + k
    if F.bits == 0:
        found = tl.load((slot + F.codes_at).to(tl.pointer_type(F.stored)) + at, mask=known, other=0).to(tl.float32)
    else:
        if F.bits == 8:
            code = tl.load((slot + F.codes_at).to(tl.pointer_type(tl.int8)) + at, mask=known, other=0)
            entry = code.to(tl.float32)
        else:
            code = codes_at(slot, at, known, F.codes_at, F.plane)
            if F.high:
                code |= codes_at(slot, at, known, F.high_at, F.high) << F.plane
            if F.has_table:
                entry = tl.load(table + code, mask=known, other=0)
            else:
                entry = (code - F.offset).to(tl.float32)
        scale = shared(slot, row, k, known, F.scale_at, F.scale, 0, F)
        if F.row is not None and F.wide == 0:
            scale *= number(slot + F.row_at + (row + k * 0) * (F.row.primitive_bitwidth // 8), known, F.row)
        if F.zero is None:
            found = entry * scale
        else:
            found = tl.fma(entry, scale, shared(slot, row, k, known, F.zero_at, F.zero, 1, F))
    return found


unpacked = triton.jit(_unpacked)
