"""Norms of heads, rotary embedding and the KV write, `core.runtime.program.rotate` in Triton. Importing this module
needs triton."""

import triton
import triton.language as tl

from core.memory.codec.fast.gpu.floats import rounded
from core.runtime.program.gpu.rms import factor_of, scaled


def _raw(x: tl.tensor, bias: tl.tensor, at: tl.tensor, known: tl.tensor) -> tl.tensor:
    """Numbers of a head as the product gives them."""
    other: tl.constexpr = None if known is None else 0
    value = tl.load(x + at, mask=known, other=other)
    if bias is not None:
        value += tl.load(bias + at, mask=known, other=other).to(tl.float32)
    return value


raw = triton.jit(_raw)


def _before(
    x: tl.tensor,
    bias: tl.tensor,
    weight: tl.tensor,
    factor: tl.tensor,
    at: tl.tensor,
    known: tl.tensor,
    NORM: tl.constexpr,
) -> tl.tensor:
    """The same after the norm that comes first; `factor` None = none does."""
    value = raw(x, bias, at, known)
    return value if factor is None else scaled(value, factor, weight, at, known, NORM.offset)


before = triton.jit(_before)


def _turned(
    x: tl.tensor,
    bias: tl.tensor,
    weight: tl.tensor,
    factor: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    at: tl.tensor,
    known: tl.tensor,
    S: tl.constexpr,
) -> tl.tensor:
    """Numbers of a head after their rotation: of a pair (a, b), fma(a, cos, -(b * sin)) and fma(b, cos, a * sin)."""
    value = before(x, bias, weight, factor, at, known, S.norm)
    if S.rotated:
        HALF: tl.constexpr = S.rotated // 2
        within = at < S.rotated if known is None else known & (at < S.rotated)
        if S.interleaved:
            second, angle = at % 2 == 1, at // 2
            other = tl.where(second, at - 1, at + 1)
        else:
            second = at >= HALF
            angle = tl.where(second, at - HALF, at)
            other = tl.where(second, at - HALF, at + HALF)
        partner = before(x, bias, weight, factor, other, within, S.norm)
        c, s = tl.load(cos + angle, mask=within, other=0), tl.load(sin + angle, mask=within, other=0)
        product = partner * s
        product = tl.where(second, product, product * -1.0)
        value = tl.where(within, tl.fma(value, c, product), value)
    return value


turned = triton.jit(_turned)


def _put(
    x: tl.tensor,
    bias: tl.tensor,
    weight: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    out: tl.tensor,
    S: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Store a head of queries or keys, normed and turned."""
    W: tl.constexpr = S.width
    at = tl.arange(0, BLOCK)
    known = at < W
    if S.norm is None:
        value = turned(x, bias, None, None, cos, sin, at, known, S)
    else:
        squares = tl.zeros((8,), tl.float32)
        for first in tl.static_range(0, W, 8):
            k = first + tl.arange(0, 8)
            if S.norm_last:
                some = turned(x, bias, None, None, cos, sin, k, k < W if W % 8 else None, S)
            else:
                some = raw(x, bias, k, k < W if W % 8 else None)
            squares = tl.fma(some, some, squares)
        factor = factor_of(squares, S.width, S.norm.eps)
        if S.norm_last:
            value = turned(x, bias, None, None, cos, sin, at, known, S)
            value = scaled(value, factor, weight, at, known, S.norm.offset)
        else:
            value = turned(x, bias, weight, factor, cos, sin, at, known, S)
    tl.store(out + at, rounded(value, out.dtype.element_ty), mask=known)


put = triton.jit(_put)


def _rotate(
    qkv: tl.tensor,
    bias: tl.tensor,
    q_weight: tl.tensor,
    k_weight: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    positions: tl.tensor,
    q: tl.tensor,
    k_at: tl.tensor,
    v_at: tl.tensor,
    k_head: tl.tensor,
    k_row: tl.tensor,
    v_head: tl.tensor,
    v_row: tl.tensor,
    CACHE: tl.constexpr,
    S: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """S: core.runtime.program.rotate.Rotate. Programs: heads of queries, then of keys, then of values; rows. qkv
    [rows, (S.keys + 2 * heads) * width] and q [rows, query_heads, width], fp32; cos and sin [context, rotated / 2] of
    all positions. Head h of position p lies at `k_at` + h * k_head + p * k_row bytes, of type CACHE."""
    index, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    W: tl.constexpr = S.width
    KEYS: tl.constexpr = S.keys
    Q: tl.constexpr = S.query_heads
    H: tl.constexpr = S.heads
    given = qkv + row * (KEYS + 2 * H) * W
    place = tl.load(positions + row)
    if S.rotated:
        cos += place * (S.rotated // 2)
        sin += place * (S.rotated // 2)
    if S.ring:
        place = place % S.ring
    if index < Q:
        head = index * (1 + S.gated) * W
        own = None if bias is None else bias + head
        put(given + head, own, q_weight, cos, sin, q + (row * Q + index) * W, S, BLOCK)
    elif index < Q + H:
        head = (KEYS + index - Q) * W
        own = None if bias is None else bias + head
        into = (k_at + (index - Q) * k_head + place * k_row).to(tl.pointer_type(CACHE))
        put(given + head, own, k_weight, cos, sin, into, S, BLOCK)
    else:
        head = (KEYS + index - Q) * W
        own = None if bias is None else bias + head
        at = tl.arange(0, BLOCK)
        value = raw(given + head, own, at, at < W)
        if S.value_norm is not None:
            squares = tl.zeros((8,), tl.float32)
            for first in tl.static_range(0, W, 8):
                k = first + tl.arange(0, 8)
                some = raw(given + head, own, k, k < W if W % 8 else None)
                squares = tl.fma(some, some, squares)
            value *= factor_of(squares, W, S.value_norm.eps)
        into = (v_at + (index - Q - H) * v_head + place * v_row).to(tl.pointer_type(CACHE))
        tl.store(into + at, rounded(value, CACHE), mask=at < W)


rotate = triton.jit(_rotate)
