"""Dequantisation kernel: the coded matrices of several experts, each in its own slot, to plain weights.

Addresses and formats as in core.memory.codec.kernels.gemv. Importing this module needs triton.
"""

import triton
import triton.language as tl

from core.memory.codec.kernels.gemv import address, inside, number


def _dequantize(
    out: tl.tensor,
    table: tl.tensor,
    bases: tl.tensor,
    q_at: tl.tensor,
    q1_at: tl.tensor,
    scale_at: tl.tensor,
    zero_at: tl.tensor,
    row_at: tl.tensor,
    LANES: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    G: tl.constexpr,
    BITS: tl.constexpr,
    TABLE: tl.constexpr,
    SCALE: tl.constexpr,
    ZERO: tl.constexpr,
    ROW: tl.constexpr,
    WIDE: tl.constexpr,
    OFFSET: tl.constexpr,
    STEP: tl.constexpr,
    WORD: tl.constexpr,
    ABOVE: tl.constexpr,
    V: tl.constexpr,
    BN: tl.constexpr,
    BU: tl.constexpr,
) -> None:
    """out[p, n, k] = W_p[n, k] in out's number type; W_p [N, K] coded, one WORD per V inputs."""
    base = address(bases, None, LANES)
    n, unit, v = tl.program_id(0) * BN + tl.arange(0, BN), tl.program_id(2) * BU + tl.arange(0, BU), tl.arange(0, V)
    HIGH: tl.constexpr = BITS - STEP  # bits that are stored apart
    known, at = (n < N)[:, None] & (unit < K // V)[None, :], n[:, None] * (K // V) + unit[None, :]
    word = tl.load(inside(base, q_at, WORD) + at, mask=known, other=0).to(tl.uint32)
    if BITS == 8:
        word = word ^ 0x80808080
    code = (word[:, :, None] >> (STEP * v)[None, None, :]) & ((1 << STEP) - 1)
    if HIGH:
        high = tl.load(inside(base, q1_at, ABOVE) + at, mask=known, other=0).to(tl.uint32)
        code += ((high[:, :, None] >> (HIGH * v)[None, None, :]) & ((1 << HIGH) - 1)) << STEP
    group = n[:, None] * (K // G) + (unit * V // G)[None, :] if G else n[:, None] + unit[None, :] * 0
    scale = number(base, scale_at, group, known, SCALE)[:, :, None]
    if ROW:
        scale = scale * number(base, row_at, n, n < N, tl.float32)[:, None, None]
    if WIDE:
        EACH: tl.constexpr = 1 if ZERO is None else 2
        shared = (n[:, None] * (K // WIDE) + (unit * V // WIDE)[None, :]) * EACH
        scale = scale * number(base, row_at, shared, known, tl.float16)[:, :, None]
    weight = (tl.load(table + code) if TABLE else code.to(tl.float32) - OFFSET) * scale
    if ZERO is not None:
        zero = number(base, zero_at, group, known, ZERO)
        if WIDE:
            zero *= number(base, row_at, shared + 1, known, tl.float16)
        weight += zero[:, :, None]
    to = out + tl.program_id(1).to(tl.int64) * N * K + (at * V)[:, :, None] + v[None, None, :]
    tl.store(to, weight.to(out.dtype.element_ty), mask=known[:, :, None])


dequantize = triton.jit(_dequantize)
