"""The canonical product in torch: slow, for any device and CPU. The oracle of the kernels."""

import torch

from core.memory.codec.bits import PLANES, unpack
from core.memory.codec.coded import scales
from core.memory.codec.fast.layout import LANES, LEVELS, block_of
from core.memory.codec.matrix import Matrix, Part
from core.memory.codec.tables import TABLES, UNITS

AT_ONCE = 1 << 22  # products held at a time


def product(matrix: Matrix, slot: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """x [n, in] times the matrix in a slot (uint8 [bytes]) -> [n, out] in fp32."""
    step = max(1, AT_ONCE // (matrix.outputs * matrix.inputs))
    by = _coded if matrix.bits else _plain
    return torch.cat([by(matrix, slot, some.float()) for some in x.split(step)])


def weights(matrix: Matrix, slot: torch.Tensor) -> torch.Tensor:
    """The weights of a matrix in a slot as `core.memory.codec.fast.unpack` reads them: [out, in] in fp32."""
    if not matrix.bits:
        if matrix.transposed:
            return _part(slot, matrix.codes, matrix.inputs, matrix.outputs).t().float()
        return _part(slot, matrix.codes, matrix.outputs, matrix.inputs).float()
    codes = _codes(matrix, slot)
    if matrix.table:
        entries = torch.tensor(TABLES[matrix.table])[codes.long()]
    else:
        entries = codes.float() - matrix.offset
    group = matrix.group or matrix.inputs
    scale, zero = _numbers(matrix, slot)
    if matrix.row is not None and not matrix.wide:
        scale = scale * _part(slot, matrix.row, matrix.outputs, 1)
    scale = scale.repeat_interleave(group, 1)
    return entries * scale if zero is None else fma(entries, scale, zero.repeat_interleave(group, 1))


def fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """a * b + c of fp32, rounded once: the product is exact in fp64, whose sum is rounded to odd before it is rounded
    to fp32, so that no number is rounded twice."""
    product, third = torch.broadcast_tensors(a.double() * b.double(), c.double())
    total = product + third
    virtual = total - product
    error = (product - (total - virtual)) + (third - virtual)
    even = (total.view(torch.int64) & 1) == 0
    away = torch.nextafter(total, torch.copysign(torch.full_like(total, torch.inf), error))
    inexact = (error != 0) & error.isfinite() & total.isfinite()
    return torch.where(inexact & even, away, total).float()


def tree(sums: torch.Tensor) -> torch.Tensor:
    """[..., LANES] -> [...]: the eight sums, added in the one order."""
    half = sums[..., :4] + sums[..., 4:]
    return (half[..., 0] + half[..., 2]) + (half[..., 1] + half[..., 3])


def rounded(x: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [n, in] in blocks of `size` -> integers [n, blocks, size] in fp64 and scales [n, blocks] in fp32."""
    blocks = x.view(len(x), -1, size)
    largest = blocks.abs().amax(-1)  # NaN where one is
    finite = largest.isfinite()
    scale = torch.where(finite, largest, 0.0) / LEVELS
    usable = scale > 0
    ratio = torch.where((usable & finite)[..., None], blocks / torch.where(usable, scale, 1.0)[..., None], 0.0)
    return ratio.round().clamp(-LEVELS, LEVELS).double(), torch.where(finite, scale, torch.nan)


def _part(slot: torch.Tensor, part: Part, *shape: int) -> torch.Tensor:
    count = torch.Size(shape).numel() * part.dtype.itemsize
    return slot[part.at : part.at + count].view(part.dtype).view(shape)


def _numbers(matrix: Matrix, slot: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scales, and zeros where there are some, of groups: [out, groups] in fp32."""
    shape = matrix.outputs, matrix.inputs // (matrix.group or matrix.inputs)
    assert matrix.scale is not None
    scale = scales(_part(slot, matrix.scale, *shape))
    zero = None if matrix.zero is None else _part(slot, matrix.zero, *shape).float()
    if not matrix.wide:
        return scale, zero
    assert matrix.row is not None
    each = 1 if zero is None else 2
    row = _part(slot, matrix.row, matrix.outputs, matrix.inputs // matrix.wide, each).float()
    row = row.repeat_interleave(matrix.wide // matrix.group, 1)
    return scale * row[..., 0], None if zero is None else zero * row[..., 1]


def _integers(matrix: Matrix, slot: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Codes as integers [out, in] in fp64, and the number that one of them stands for."""
    codes = _codes(matrix, slot)
    if matrix.table:
        unit = UNITS[matrix.table]
        entries = torch.tensor([round(value * unit) for value in TABLES[matrix.table]], dtype=torch.float64)
        return entries[codes.long()], 1 / unit
    return codes.double() - matrix.offset, 1.0


def _codes(matrix: Matrix, slot: torch.Tensor) -> torch.Tensor:
    parts = zip((matrix.codes, matrix.high), PLANES[matrix.bits], strict=False)
    planes = [_part(slot, part, matrix.outputs, matrix.inputs * bits // 8) for part, bits in parts if part is not None]
    return unpack(planes, matrix.bits)


def _coded(matrix: Matrix, slot: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    size = block_of(matrix)
    integers, factor = _integers(matrix, slot)
    q, s = rounded(x, size)  # [n, blocks, size], [n, blocks]
    sums = torch.einsum("nbi,obi->nob", q, integers.view(matrix.outputs, -1, size)).float()
    scale, zero = _numbers(matrix, slot)
    spread = matrix.group // size
    by = scale.repeat_interleave(spread, 1) * s[:, None] if matrix.group else s[:, None].expand_as(sums)
    total = _in_order(sums, by)
    if zero is not None:
        each = zero.repeat_interleave(spread, 1).expand(len(x), -1, -1)
        total = total + _in_order(each, (q.sum(-1).float() * s)[:, None])
    y = tree(total) * factor if factor != 1.0 else tree(total)
    return y * scales(_part(slot, matrix.row_scale, matrix.outputs)) if matrix.row_scale else y


def _plain(matrix: Matrix, slot: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return tree(_in_order(weights(matrix, slot).expand(len(x), -1, -1), x[:, None]))


def _in_order(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """sum over the last axis by fma(a, b, A[i mod LANES]), in order: [n, out, terms] -> [n, out, LANES]."""
    a, b = torch.broadcast_tensors(a, b)
    total = a.new_zeros(*a.shape[:-1], LANES)
    for start in range(0, a.shape[-1], LANES):
        some = slice(start, min(start + LANES, a.shape[-1]))
        width = some.stop - some.start
        total[..., :width] = fma(a[..., some], b[..., some], total[..., :width])
    return total
