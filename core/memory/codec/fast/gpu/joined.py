"""The kernel of several matrices by the same rows of x, in one launch. Importing this module needs triton."""

import triton
import triton.language as tl

from core.memory.codec.fast.gpu.product import numbered, rows


def _put(
    y: tl.tensor,
    out: tl.tensor,
    bias: tl.tensor,
    p: tl.tensor,
    last: tl.tensor,
    n: tl.tensor,
    column: tl.tensor,
    out_stride: tl.tensor,
    F: tl.constexpr,
) -> None:
    """Store the results of rows p of x, those before the `last`."""
    if bias is not None:
        y += tl.load(bias + column, mask=n < F.outputs, other=0).to(tl.float32)
    into = out + (p.to(tl.int64) * out_stride)[None, :, None] + column
    tl.store(into, y, mask=(n < F.outputs) & (p < last)[None, :, None])


put = triton.jit(_put)


def _one(
    x: tl.tensor,
    out: tl.tensor,
    bias: tl.tensor,
    slot: tl.tensor,
    block: tl.tensor,
    count: tl.tensor,
    stride: tl.tensor,
    out_stride: tl.tensor,
    TOGETHER: tl.constexpr,
    CHUNK: tl.constexpr,
    COLUMN: tl.constexpr,
    F: tl.constexpr,
) -> None:
    """The same by one of the matrices: a block of its rows, with results from COLUMN on."""
    X: tl.constexpr = x.dtype.element_ty
    begin = x.to(tl.int64)
    start = tl.program_id(1) * CHUNK
    last = tl.minimum(start + CHUNK, count)
    first_row = block * (F.deep * F.across)
    row = numbered(first_row, 0, F, F.outputs - 1)
    n = (first_row + tl.arange(0, F.deep) * F.across)[:, None, None] + tl.arange(0, F.across)[None, None, :]
    column = COLUMN + n
    if TOGETHER == 1:
        y = rows(slot, begin, row, X, 1, F)
        put(y, out, bias, start + tl.zeros((1,), tl.int32), last, n, column, out_stride, F)
    else:
        for first in range(start, last, TOGETHER):
            p = first + tl.arange(0, TOGETHER)
            given = begin + tl.minimum(p, last - 1).to(tl.int64) * stride
            put(rows(slot, given, row, X, TOGETHER, F), out, bias, p, last, n, column, out_stride, F)


one = triton.jit(_one)


def _multiplied(
    x: tl.tensor,
    out: tl.tensor,
    bias: tl.tensor,
    bases: tl.tensor,
    count: tl.tensor,
    stride: tl.tensor,
    out_stride: tl.tensor,
    TOGETHER: tl.constexpr,
    CHUNK: tl.constexpr,
    J: tl.constexpr,
) -> None:
    """out[r] = row r of x, of `count`, by the matrices J at the addresses `bases`, one's results after the other's,
    plus `bias`, in fp32. Programs: blocks of all matrices' rows, chunks of CHUNK rows of x, TOGETHER at once, 1 where
    there is one row. Rows of x are `stride` bytes apart, those of out `out_stride` numbers."""
    block = tl.program_id(0)
    COUNT: tl.constexpr = J.count
    for i in tl.static_range(COUNT):
        if (block >= J.starts[i]) & (block < J.starts[i + 1]):
            slot, own = bases[i].to(tl.int64), block - J.starts[i]
            one(x, out, bias, slot, own, count, stride, out_stride, TOGETHER, CHUNK, J.columns[i], J.forms[i])


multiplied = triton.jit(_multiplied)


def _joined(
    x: tl.tensor,
    out: tl.tensor,
    bias: tl.tensor,
    bases: tl.tensor,
    count: tl.tensor,
    stride: tl.tensor,
    out_stride: tl.tensor,
    TOGETHER: tl.constexpr,
    CHUNK: tl.constexpr,
    J: tl.constexpr,
) -> None:
    """As `multiplied`, and no more."""
    multiplied(x, out, bias, bases, count, stride, out_stride, TOGETHER, CHUNK, J)


joined = triton.jit(_joined)
