"""Rounds rows of x to 8-bit integers, in the order in which codes meet them. Importing this module needs triton."""

import triton
import triton.language as tl

from core.memory.codec.fast.layout import LEVELS

MOST = tl.constexpr(float(LEVELS))
WHOLE = tl.constexpr(1.5 * 2**23)  # a number added to this is rounded to an integer, ties to even
INFINITE = tl.constexpr(0x7F800000)
NAN = tl.constexpr(0x7FC00000)


def _put_blocks(
    x: tl.tensor, begin: tl.tensor, block: tl.tensor, BLOCKS: tl.constexpr, TILED: tl.constexpr, F: tl.constexpr
) -> None:
    """Store some blocks [BLOCKS] of a row x, F.inputs numbers, in the F.prepared words of int32 that `begin` there. A
    block with a number that is not finite has scale NaN.

    The integers of all blocks that meet the codes of one shift are together, as `Form` says; where TILED those of all
    shifts of one block, in the order of the bytes that have their codes, with tables too."""
    W: tl.constexpr = F.words
    P: tl.constexpr = F.shifts
    APART: tl.constexpr = 1 if TILED else F.apart
    BESIDE: tl.constexpr = P if TILED else F.beside
    word = block[:, None] * W + tl.arange(0, W)[None, :]
    within = (tl.arange(0, P) * APART)[:, None] + (tl.arange(0, 4) * BESIDE)[None, :]
    at = (word * F.per_word)[:, :, None, None] + within[None, None, :, :]
    known = (block < F.blocks)[:, None, None, None]
    value = tl.load(x + at, mask=known, other=0).to(tl.float32)

    bits = tl.reshape(value.to(tl.int32, bitcast=True) & 0x7FFFFFFF, (BLOCKS, W * P * 4))
    largest = tl.max(bits, 1)
    finite = largest < INFINITE
    scale = tl.div_rn(largest.to(tl.float32, bitcast=True), tl.full((BLOCKS,), MOST, tl.float32))
    usable = finite & (scale > 0)
    divisor = tl.where(usable, scale, 1.0)[:, None, None, None]
    ratio = tl.div_rn(tl.where(usable[:, None, None, None], value, 0.0), divisor)
    near = (ratio + WHOLE) - WHOLE
    near = tl.where(near > MOST, MOST, tl.where(near < -MOST, -MOST, near))  # scales of few bits, below 2 ** -126
    whole = near.to(tl.int32)
    total = tl.sum(tl.reshape(whole, (BLOCKS, W * P * 4)), 1)
    scaled = total.to(tl.float32) * scale
    nan = tl.full((BLOCKS,), NAN, tl.int32)

    bytes_ = (whole & 255) << (tl.arange(0, 4) * 8)[None, None, None, :]
    if TILED:
        first = (block * (W * P))[:, None] + tl.arange(0, W)[None, :]
        place = begin + first[:, :, None] + (tl.arange(0, P) * W)[None, None, :]
    else:
        place = begin + word[:, :, None] + (tl.arange(0, P) * F.row_words)[None, None, :]
    tl.store(place, tl.sum(bytes_, 3), mask=(block < F.blocks)[:, None, None])
    facts, real = begin + F.inputs // 4 + block, block < F.blocks
    tl.store(facts, tl.where(finite, scale.to(tl.int32, bitcast=True), nan), mask=real)
    tl.store(facts + F.blocks, total, mask=real)
    tl.store(facts + 2 * F.blocks, tl.where(finite, scaled.to(tl.int32, bitcast=True), nan), mask=real)


put_blocks = triton.jit(_put_blocks)


def _put_row(x: tl.tensor, into: tl.tensor, BLOCKS: tl.constexpr, R: tl.constexpr) -> None:
    """Store a row x in each of the ways of R: core.memory.codec.fast.gpu.form.Ways."""
    COUNT: tl.constexpr = R.count
    for i in tl.static_range(COUNT):
        for first in range(0, R.forms[i].blocks, BLOCKS):
            put_blocks(x, into + R.begins[i], first + tl.arange(0, BLOCKS), BLOCKS, False, R.forms[i])


put_row = triton.jit(_put_row)


def _prepare(
    x: tl.tensor, into: tl.tensor, stride: tl.tensor, BLOCKS: tl.constexpr, TILED: tl.constexpr, F: tl.constexpr
) -> None:
    """into[r], F.prepared words of int32, is row r of x; rows are `stride` numbers apart. Programs: BLOCKS blocks each,
    rows."""
    row = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    put_blocks(x + row * stride, into + row * F.prepared, block, BLOCKS, TILED, F)


prepare = triton.jit(_prepare)
