"""RMSNorm of rows, `core.runtime.program.rms` in Triton. Importing this module needs triton."""

import triton
import triton.language as tl

from core.memory.codec.fast.gpu.floats import tree
from core.memory.codec.fast.gpu.prepare import put_row

AHEAD = tl.constexpr(16)  # steps whose numbers are read at once


def _total(lanes: tl.tensor) -> tl.tensor:
    """[1]: the sum of eight lanes."""
    return tl.reshape(tree(tl.reshape(lanes, (1, 1, 1, 8))), (1,))


total = triton.jit(_total)


def _factor(squares: tl.tensor, WIDTH: tl.constexpr, EPS: tl.constexpr) -> tl.tensor:
    """[1]: 1 / sqrt(mean of squares + eps), from the eight partial sums of squares."""
    mean = tl.div_rn(total(squares), tl.full((1,), WIDTH, tl.float32))
    return tl.div_rn(tl.full((1,), 1.0, tl.float32), tl.sqrt_rn(mean + EPS))


factor_of = triton.jit(_factor)


def _scaled(
    value: tl.tensor, factor: tl.tensor, weight: tl.tensor, at: tl.tensor, known: tl.tensor, OFFSET: tl.constexpr
) -> tl.tensor:
    """Some numbers of a row after the norm; `weight` None = there are none."""
    value *= factor
    if weight is not None:
        by = tl.load(weight + at, mask=known, other=None if known is None else 0).to(tl.float32)
        if OFFSET:
            by += 1.0
        value *= by
    return value


scaled = triton.jit(_scaled)


def _sum_of(
    x: tl.tensor, delta: tl.tensor, times: tl.tensor, at: tl.tensor, known: tl.tensor, SCALE: tl.constexpr
) -> tl.tensor:
    """Some numbers of a row, with what is added to them."""
    other: tl.constexpr = None if known is None else 0
    value = tl.load(x + at, mask=known, other=other)
    if delta is not None:
        more = tl.load(delta + at, mask=known, other=other)
        value = value + more if SCALE == 1 else tl.fma(tl.zeros_like(more) + SCALE, more, value)
        if times is not None:
            value *= tl.load(times)
    return value


sum_of = triton.jit(_sum_of)


def _normed(
    x: tl.tensor,
    delta: tl.tensor,
    weight: tl.tensor,
    times: tl.tensor,
    out: tl.tensor,
    into: tl.tensor,
    N: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    R: tl.constexpr,
) -> None:
    """A row: out = the norm N of x + SCALE * delta, times a number, which is stored in x; without `delta`, of x. `out`
    may be x. Where R is not None, the row is prepared as well, BLOCKS blocks at once."""
    WIDTH: tl.constexpr = N.width
    squares = tl.zeros((8,), tl.float32)
    for first in range(0, WIDTH // (8 * AHEAD) * 8 * AHEAD, 8 * AHEAD):
        for i in tl.static_range(AHEAD):
            value = sum_of(x, delta, times, first + 8 * i + tl.arange(0, 8), None, SCALE)
            squares = tl.fma(value, value, squares)
    for first in range(WIDTH // (8 * AHEAD) * 8 * AHEAD, WIDTH, 8):
        k = first + tl.arange(0, 8)
        value = sum_of(x, delta, times, k, k < WIDTH, SCALE)
        squares = tl.fma(value, value, squares)
    factor = factor_of(squares, WIDTH, N.eps)
    tl.debug_barrier()  # all threads have read what is overwritten
    for first in range(0, WIDTH, BLOCK):
        k = first + tl.arange(0, BLOCK)
        value = sum_of(x, delta, times, k, k < WIDTH, SCALE)
        if delta is not None:
            tl.store(x + k, value, mask=k < WIDTH)
        tl.store(out + k, scaled(value, factor, weight, k, k < WIDTH, N.offset), mask=k < WIDTH)
    if R is not None:
        tl.debug_barrier()
        put_row(out, into, BLOCKS, R)


normed = triton.jit(_normed)


def _rms(
    x: tl.tensor,
    delta: tl.tensor,
    weight: tl.tensor,
    times: tl.tensor,
    out: tl.tensor,
    x_stride: tl.tensor,
    out_stride: tl.tensor,
    into: tl.tensor,
    N: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    R: tl.constexpr,
) -> None:
    """N: core.runtime.program.rms.Norm. A program is a row; rows of x and out are strides of numbers apart. `into`
    [rows, R.begins[-1]], int32."""
    row = tl.program_id(0).to(tl.int64)
    if delta is not None:
        delta += row * N.width
    if R is not None:
        into += row * R.begins[R.count]
    normed(x + row * x_stride, delta, weight, times, out + row * out_stride, into, N, SCALE, BLOCK, BLOCKS, R)


rms = triton.jit(_rms)
