"""Rows of codes times prepared rows of x, in the canonical order. Importing this module needs triton.

Tiles are [deep, lanes, across, 8 (, words)]: rows of the matrix that a thread has and that threads share; slots or rows
of x; the eight blocks of a step; the words of a block. Tiles of x lack `deep`, but are loaded for each row `across`, so
that every thread has what it multiplies, and nothing passes between threads before integers are added up.
"""

import triton
import triton.language as tl

from core.memory.codec.fast.gpu.floats import lanes, number, tree
from core.memory.codec.fast.gpu.integers import dot4, entries, few_entries


def _aligned(start: tl.tensor, at: tl.constexpr, TYPE: tl.constexpr) -> tl.tensor:
    """Pointers `at` bytes after the start of slots, or of rows of x. The compiler cannot infer that these are multiples
    of 16: one for all lanes, or [1, lanes, 1, 1, 1]."""
    if start.type.is_block():
        begin = tl.multiple_of(start[None, :, None, None, None].to(tl.pointer_type(tl.uint8)), (1, 1, 1, 1, 16))
    else:
        begin = tl.multiple_of(start.to(tl.pointer_type(tl.uint8)), 16)
    return (begin + at).to(tl.pointer_type(TYPE))


aligned = triton.jit(_aligned)


def _whole(
    slot: tl.tensor, x: tl.tensor, row: tl.tensor, block: tl.tensor, known: tl.tensor, F: tl.constexpr
) -> tl.tensor:
    """[deep, lanes, across, 8]: sums of codes times integers of x, before the offset."""
    W: tl.constexpr = F.words
    SHIFTS: tl.constexpr = F.shifts
    at = (block[:, None] * W + tl.arange(0, W)[None, :])[None, None, None, :, :]
    other: tl.constexpr = None if known is None else 0
    each = None if known is None else known[:, :, :, :, None]
    place = (row * F.row_words)[:, None, :, None, None] + at
    codes = tl.load(aligned(slot, F.codes_at, tl.int32) + place, mask=each, other=other)
    if F.in_digits:
        which, upper = codes & 0x77777777, ((codes >> 1) & 0x44444444) | 0x32103210
    if F.high:  # each byte gets the bits of its codes: those of the lowest shift are the lowest
        top = tl.load(aligned(slot, F.high_at, F.above) + place, mask=each, other=other).to(tl.int32)
        if F.high * F.shifts == 4:
            top = (top | top << 8) & 0x00FF00FF
            top = (top | top << 4) & 0x0F0F0F0F
        else:
            top = (top | top << 12) & 0x000F000F
            top = (top | top << 6) & 0x03030303
    given = aligned(x, 0, tl.int32) + tl.zeros((1, 1, row.shape[1], 1, 1), tl.int32)
    total = tl.zeros((1, 1, 1, 1, 1), tl.int32)
    for k in tl.static_range(SHIFTS):
        if F.in_digits:
            some = entries(which >> 16 * k, upper >> 16 * k, F.table)
        elif F.bits == 8:
            some = codes
        else:
            some = (codes >> F.plane * k) & (((1 << F.plane) - 1) * 0x01010101)
            if F.high:
                some |= ((top >> F.high * k) & (((1 << F.high) - 1) * 0x01010101)) << F.plane
            if F.has_table:
                some = few_entries(some, F.table)
        total = dot4(some, tl.load(given + (k * F.row_words + at), mask=each, other=other), total)
    return tl.sum(total, 4)


whole = triton.jit(_whole)


def _step(
    step: tl.tensor,
    sums: tl.tensor,
    zeros: tl.tensor,
    slot: tl.tensor,
    x: tl.tensor,
    row: tl.tensor,
    LAST: tl.constexpr,
    F: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Add the terms of eight blocks; of fewer in the LAST step."""
    block = step * 8 + tl.arange(0, 8)
    known = (block < F.blocks)[None, None, None, :] if LAST else None
    other: tl.constexpr = 0 if LAST else None
    total = whole(slot, x, row, block, known, F)
    facts = lanes(x).to(tl.pointer_type(tl.int32)) + (F.inputs // 4 + block)[None, None, None, :]
    if F.offset:
        total -= F.offset * tl.load(facts + F.blocks, mask=known, other=other)
    by = tl.load(facts, mask=known, other=other).to(tl.float32, bitcast=True)
    if F.group:
        group = (row * (F.inputs // F.group))[:, None, :, None] + (block // (F.group // F.size))[None, None, None, :]
        begin = lanes(slot)
        scale = number(begin + F.scale_at + group * (F.scale.primitive_bitwidth // 8), known, F.scale)
        if F.wide:
            EACH: tl.constexpr = 1 if F.zero is None else 2
            wide = (row * (F.inputs // F.wide))[:, None, :, None] + (block * F.size // F.wide)[None, None, None, :]
            shared = begin + F.row_at + wide * (2 * EACH)
            scale *= number(shared, known, F.row)
        by = scale * by
    sums = tl.fma(total.to(tl.float32), by, sums)
    if F.zero is not None:
        zero = number(begin + F.zero_at + group * (F.zero.primitive_bitwidth // 8), known, F.zero)
        if F.wide:
            zero *= number(shared + 2, known, F.row)
        scaled = tl.load(facts + 2 * F.blocks, mask=known, other=other).to(tl.float32, bitcast=True)
        zeros = tl.fma(zero, scaled, zeros)
    return sums, zeros


add_step = triton.jit(_step)


def _coded_rows(slot: tl.tensor, x: tl.tensor, row: tl.tensor, LANES: tl.constexpr, F: tl.constexpr) -> tl.tensor:
    """[deep, LANES, across]: rows [deep, across] of the matrix in each slot times a prepared row of x
    each: addresses, [LANES] or one for all."""
    sums = tl.zeros((row.shape[0], LANES, row.shape[1], 8), tl.float32)
    zeros = sums
    for step in range(F.blocks // 8):
        sums, zeros = add_step(step, sums, zeros, slot, x, row, False, F)
    if F.blocks % 8:
        sums, zeros = add_step(F.blocks // 8, sums, zeros, slot, x, row, True, F)
    if F.zero is not None:
        sums += zeros
    y = tree(sums)
    return y * F.factor if F.factor != 1.0 else y


coded_rows = triton.jit(_coded_rows)
