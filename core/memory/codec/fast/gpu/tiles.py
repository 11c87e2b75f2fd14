"""Many rows of x times rows of codes by int8 tensor cores, in the canonical order: the bits of one row at a time, as
integer sums of blocks are exact. Importing this module needs triton.

A tile has one of the eight sums of its numbers at a time: blocks are read in the order 0, 8, 16 ... 4, 12 ... 2 ... 6
..., in which the tree over the sums needs to keep three of them.
"""

import triton
import triton.language as tl

from core.memory.codec.fast.gpu.floats import number, rounded
from core.memory.codec.fast.gpu.integers import entry, taken
from core.memory.codec.fast.gpu.product import ended

LEAST = tl.constexpr(32)  # numbers that tensor cores add up
BIASED = tl.constexpr(0x4B400000)  # the bits of 3 * 2**22 in fp32: of that plus an integer of 22 bits, if one adds it
SHIFT = tl.constexpr(float(3 << 22))


def _weights(
    slot: tl.tensor,
    row: tl.tensor,
    block: tl.tensor,
    K: tl.constexpr,
    F: tl.constexpr,
) -> tl.tensor:
    """[rows, K] int8: the integers of a block before the offset, in the order of a prepared row of x that is TILED;
    0 behind them."""
    at = tl.arange(0, K)
    B: tl.constexpr = F.block_bytes
    begin = tl.multiple_of(slot.to(tl.pointer_type(tl.uint8)), 16).to(tl.pointer_type(tl.int8))
    place = (row * (F.row_words * 4))[:, None] + (block * B + at % B)[None, :]
    codes = tl.load(begin + F.codes_at + place)
    if F.bits != 8:
        codes = taken(codes, at // B * F.plane, (1 << F.plane) - 1, F.steps, F.moving, F.keeping[0])
    if F.high:
        PER: tl.constexpr = 8 // F.high
        number = (at % B * F.shifts + at // B) % F.size  # of a block
        place = (row * (F.inputs // PER))[:, None] + (block * (F.size // PER) + number // PER)[None, :]
        above, shift = tl.load(begin + F.high_at + place), number % PER * F.high
        above = taken(above, shift, (1 << F.high) - 1, F.high_steps, F.high_moving, F.keeping[1])
        codes = codes | above << F.plane
    if F.has_table:
        codes = entry(codes, F.table, F.finding)
    return tl.where((at < F.size)[None, :], codes, 0) if F.size < K else codes


weights = triton.jit(_weights)


def _tile(slot: tl.tensor, x: tl.tensor, row: tl.tensor, F: tl.constexpr) -> tl.tensor:
    """[rows, lanes]: rows of the matrix in a slot times prepared rows of x, which are TILED, at addresses [lanes],
    before what is multiplied last."""
    N: tl.constexpr = row.shape[0]
    M: tl.constexpr = x.shape[0]
    K: tl.constexpr = F.size if F.size > LEAST else LEAST
    EACH: tl.constexpr = (F.blocks + 7) // 8
    at = tl.arange(0, K)
    given = tl.multiple_of(x.to(tl.pointer_type(tl.int8)), 16)
    facts = (given + F.inputs).to(tl.pointer_type(tl.int32))
    sums = tl.zeros((N, M), tl.float32)
    zeros, first, second, third = sums, sums, sums, sums
    for i in range(8 * EACH):
        turn = i // EACH
        block = ((turn & 1) << 2 | turn & 2 | turn >> 2) + (i - turn * EACH) * 8
        known = block < F.blocks
        if F.blocks % 8:
            block = tl.minimum(block, F.blocks - 1)
        states = tl.load(tl.multiple_of(given[None, :] + block * F.size, (16, 1)) + at[:, None])
        start = tl.zeros((M,), tl.int32) + BIASED
        if F.offset:
            start -= F.offset * tl.load(facts + F.blocks + block)
        codes = weights(slot, row, block, K, F)
        total = tl.dot(codes, states, tl.broadcast_to(start[None, :], (N, M)), out_dtype=tl.int32)
        by = tl.load(facts + block).to(tl.float32, bitcast=True)
        if F.blocks % 8:
            by = tl.where(known, by, 0.0)
        by = by[None, :]
        if F.group:
            group = row * (F.inputs // F.group) + block // (F.group // F.size)
            scale = number(slot + F.scale_at + group * (F.scale.primitive_bitwidth // 8), None, F.scale)
            if F.wide:
                EACH_WIDE: tl.constexpr = 1 if F.zero is None else 2
                shared = slot + F.row_at + (row * (F.inputs // F.wide) + block * F.size // F.wide) * (2 * EACH_WIDE)
                scale *= number(shared, None, F.row)
            if F.blocks % 8:
                scale = tl.where(known, scale, 0.0)
            by = scale[:, None] * by
        sums = tl.fma(total.to(tl.float32, bitcast=True) - SHIFT, tl.broadcast_to(by, (N, M)), sums)
        if F.zero is not None:
            zero = number(slot + F.zero_at + group * (F.zero.primitive_bitwidth // 8), None, F.zero)
            if F.wide:
                zero *= number(shared + 2, None, F.row)
            scaled = tl.load(facts + 2 * F.blocks + block).to(tl.float32, bitcast=True)
            if F.blocks % 8:
                zero, scaled = tl.where(known, zero, 0.0), tl.where(known, scaled, 0.0)
            zeros = tl.fma(tl.broadcast_to(zero[:, None], (N, M)), tl.broadcast_to(scaled[None, :], (N, M)), zeros)
        if i - turn * EACH == EACH - 1:  # the sum of these blocks is done
            if F.zero is not None:
                sums += zeros
                zeros = tl.zeros((N, M), tl.float32)
            if turn & 1:
                sums = first + sums
                if turn & 2:
                    sums = second + sums
                    if turn & 4:
                        first = third + sums
                    else:
                        third = sums
                else:
                    second = sums
            else:
                first = sums
            sums = tl.zeros((N, M), tl.float32)
    return first * F.factor if F.factor != 1.0 else first


tile = triton.jit(_tile)


def _tiled(
    x: tl.tensor,
    out: tl.tensor,
    bases: tl.tensor,
    ids: tl.tensor,
    ends: tl.tensor,
    index: tl.tensor,
    stride: tl.tensor,
    ROWS: tl.constexpr,
    TOGETHER: tl.constexpr,
    JOIN: tl.constexpr,
    SPEC: tl.constexpr,
    F: tl.constexpr,
) -> None:
    """As `product` of core.memory.codec.fast.gpu.product with `ends`, for rows of x that are TILED: ROWS rows of the
    matrix by TOGETHER of x at once."""
    N: tl.constexpr = F.outputs if JOIN is None else F.outputs // 2
    D: tl.constexpr = ROWS if JOIN is None else ROWS // 2
    group = tl.program_id(1)
    slot, begin = tl.load(bases + tl.load(ids + group)), x.to(tl.int64)
    number = tl.arange(0, ROWS)
    row = tl.minimum(tl.program_id(0) * D + number % D, N - 1)
    if JOIN is not None:
        row = row * 2 + number // D if SPEC.interleaved else row + number // D * N
    n = tl.program_id(0) * D + tl.arange(0, D)
    last = tl.load(ends + group + 1).to(tl.int32)
    for first in range(tl.load(ends + group).to(tl.int32), last, TOGETHER):
        p = first + tl.arange(0, TOGETHER)
        given = begin + tl.load(index + tl.minimum(p, last - 1)) * stride
        y = ended(tile(slot, given, row, F), slot, row[:, None], F)
        if JOIN is not None:
            gates, ups = tl.split(tl.permute(tl.reshape(y, (2, D, TOGETHER)), (1, 2, 0)))
            y = JOIN(gates, ups, SPEC)
        at = out + (p.to(tl.int64) * N)[None, :] + n[:, None]
        tl.store(at, rounded(y, out.dtype.element_ty), mask=(n < N)[:, None] & (p < last)[None, :])


tiled = triton.jit(_tiled)


def _one(
    x: tl.tensor,
    out: tl.tensor,
    bias: tl.tensor,
    slot: tl.tensor,
    block: tl.tensor,
    count: tl.tensor,
    stride: tl.tensor,
    out_stride: tl.tensor,
    ROWS: tl.constexpr,
    TOGETHER: tl.constexpr,
    COLUMN: tl.constexpr,
    F: tl.constexpr,
) -> None:
    """As `one` of core.memory.codec.fast.gpu.joined."""
    p = tl.program_id(1) * TOGETHER + tl.arange(0, TOGETHER)
    n = block * ROWS + tl.arange(0, ROWS)
    row = tl.minimum(n, F.outputs - 1)
    given = x.to(tl.int64) + tl.minimum(p, count - 1).to(tl.int64) * stride
    y = ended(tile(slot, given, row, F), slot, row[:, None], F)
    if bias is not None:
        y += tl.load(bias + COLUMN + row).to(tl.float32)[:, None]
    at = out + (p.to(tl.int64) * out_stride)[None, :] + (COLUMN + n)[:, None]
    tl.store(at, y, mask=(n < F.outputs)[:, None] & (p < count)[None, :])


one = triton.jit(_one)


def _tiled_joined(
    x: tl.tensor,
    out: tl.tensor,
    bias: tl.tensor,
    bases: tl.tensor,
    count: tl.tensor,
    stride: tl.tensor,
    out_stride: tl.tensor,
    ROWS: tl.constexpr,
    TOGETHER: tl.constexpr,
    J: tl.constexpr,
) -> None:
    """As `joined` of core.memory.codec.fast.gpu.joined, for rows of x that are TILED: ROWS rows of a matrix by TOGETHER
    of x at once."""
    block = tl.program_id(0)
    COUNT: tl.constexpr = J.count
    for i in tl.static_range(COUNT):
        if (block >= J.starts[i]) & (block < J.starts[i + 1]):
            slot, own = bases[i].to(tl.int64), block - J.starts[i]
            one(x, out, bias, slot, own, count, stride, out_stride, ROWS, TOGETHER, J.columns[i], J.forms[i])


tiled_joined = triton.jit(_tiled_joined)
