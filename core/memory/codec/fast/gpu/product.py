"""The kernel of one product: rows of x times the matrix of each expert's slot. Importing this module needs triton."""

import triton
import triton.language as tl

from core.memory.codec.fast.gpu.codes import coded_rows
from core.memory.codec.fast.gpu.floats import number, rounded
from core.memory.codec.fast.gpu.last import is_last
from core.memory.codec.fast.gpu.plain import plain_rows
from core.memory.codec.fast.gpu.prepare import put_row
from core.memory.codec.kernels.gemv import address


def _ended(y: tl.tensor, begin: tl.tensor, row: tl.tensor, F: tl.constexpr) -> tl.tensor:
    """Products y, of the shape of `row`, times the scales of rows, plus bias. `begin`: addresses of slots."""
    if F.bits and F.group == 0:
        y *= number(begin + F.scale_at + row * (F.scale.primitive_bitwidth // 8), None, F.scale)
    if F.bits and F.row is not None and F.wide == 0:
        y *= number(begin + F.row_at + row * (F.row.primitive_bitwidth // 8), None, F.row)
    if F.bias is not None:
        y += number(begin + F.bias_at + row * (F.bias.primitive_bitwidth // 8), None, F.bias)
    return y


ended = triton.jit(_ended)


def _rows(
    slot: tl.tensor, x: tl.tensor, row: tl.tensor, X: tl.constexpr, LANES: tl.constexpr, F: tl.constexpr
) -> tl.tensor:
    """[deep, LANES, across]: rows [deep, across] of the matrix in each slot, times a row of x each, plus bias. `slot`
    and `x` are addresses, [LANES] or one for all; `x` of prepared rows, or of plain numbers of type X."""
    begin = slot[None, :, None] if slot.type.is_block() else slot
    y = coded_rows(slot, x, row, LANES, F) if F.bits else plain_rows(slot, x, row, X, LANES, F)
    return ended(y, begin, row[:, None, :], F)


rows = triton.jit(_rows)


def _numbered(first: tl.tensor, APART: tl.constexpr, F: tl.constexpr, LAST: tl.constexpr) -> tl.tensor:
    """[deep, across]: numbers of a program's rows of the matrix, none above LAST. Where APART is not 0, those in the
    second half of the rows that a thread has are APART behind those in the first; 1: rows of both take turns."""
    D: tl.constexpr = F.deep if APART == 0 else F.deep // 2
    number = tl.arange(0, F.deep)
    n = tl.minimum((first + (number % D) * F.across)[:, None] + tl.arange(0, F.across)[None, :], LAST)
    if APART == 1:
        n *= 2
    return n + (number // D * APART)[:, None]


numbered = triton.jit(_numbered)


def _halves(y: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """[deep, lanes, across] -> both halves of the rows that a thread has."""
    D: tl.constexpr = y.shape[0] // 2
    first, second = tl.split(tl.permute(tl.reshape(y, (2, D, y.shape[1], y.shape[2])), (1, 2, 3, 0)))
    return first, second


halves = triton.jit(_halves)


def _product(
    x: tl.tensor,
    out: tl.tensor,
    bases: tl.tensor,
    ids: tl.tensor,
    ends: tl.tensor,
    index: tl.tensor,
    stride: tl.tensor,
    into: tl.tensor,
    counters: tl.tensor,
    LANES: tl.constexpr,
    TOGETHER: tl.constexpr,
    BLOCKS: tl.constexpr,
    JOIN: tl.constexpr,
    SPEC: tl.constexpr,
    R: tl.constexpr,
    F: tl.constexpr,
) -> None:
    """out[p, n] = row n of expert g's matrix times row p of x, plus bias, rounded once. Programs: blocks of n, experts.
    With a function JOIN, out[p, n] = JOIN(row n, row n + half, SPEC); where SPEC.interleaved, of rows 2 n and 2 n + 1.

    Without `ends`, expert g has the row p = g, number g of x. With them, expert g has the rows from ends[g] to
    ends[g + 1], TOGETHER of them at once: row p is number index[p] of x. Rows of x are `stride` bytes apart. `bases`,
    `ids`, LANES: as in gemv.py. Of an expert that the device finds by its number and whose address is 0, nothing is
    computed. Where R is not None and there are no `ends`, an expert's last program also prepares its row of out, which
    is fp32: into[g], BLOCKS blocks at once; `counters` [experts] as `is_last` takes them.
    """
    X: tl.constexpr = x.dtype.element_ty
    N: tl.constexpr = F.outputs if JOIN is None else F.outputs // 2
    D: tl.constexpr = F.deep if JOIN is None else F.deep // 2
    APART: tl.constexpr = 0 if JOIN is None else (1 if SPEC.interleaved else N)
    group = tl.program_id(1).to(tl.int64)
    slot, begin = address(bases, ids, LANES), x.to(tl.int64)
    if LANES == 0:
        if slot == 0:
            return
    start = tl.program_id(0) * D * F.across
    row = numbered(start, APART, F, N - 1)
    n = (start + tl.arange(0, D) * F.across)[:, None, None] + tl.arange(0, F.across)[None, None, :]
    if ends is None:
        y = rows(slot, begin + group * stride, row, X, 1, F)
        if JOIN is not None:
            first_half, second_half = halves(y)
            y = JOIN(first_half, second_half, SPEC)
        tl.store(out + group * N + n, rounded(y, out.dtype.element_ty), mask=n < N)
        if R is not None:
            if is_last(counters + group, (N + D * F.across - 1) // (D * F.across)):
                put_row(out + group * N, into + group * R.begins[R.count], BLOCKS, R)
    else:
        last = tl.load(ends + group + 1).to(tl.int32)
        for first in range(tl.load(ends + group).to(tl.int32), last, TOGETHER):
            p = first + tl.arange(0, TOGETHER)
            given = begin + tl.load(index + tl.minimum(p, last - 1)) * stride
            y = rows(slot, given, row, X, TOGETHER, F)
            if JOIN is not None:
                first_half, second_half = halves(y)
                y = JOIN(first_half, second_half, SPEC)
            at = out + (p.to(tl.int64) * N)[None, :, None] + n
            tl.store(at, rounded(y, out.dtype.element_ty), mask=(n < N) & (p < last)[None, :, None])


product = triton.jit(_product)
