"""The kernels of a decoded token's attention. Importing this module needs triton.

Query heads that share keys and values are one tile, so that these are read once. Positions are computed in parts of
CHUNK, whose results are joined in their order: no bit depends on how many parts were launched.
"""

import triton
import triton.language as tl


def _filled(count: tl.tensor, position: tl.tensor) -> tl.tensor:
    """Positions to attend to: `count`, or where `position` [1] int64 is on the device, all up to it."""
    if position is not None:
        count = tl.load(position).to(tl.int32) + 1
    return count


filled = triton.jit(_filled)


def _attend_part(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    sums: tl.tensor,
    scales: tl.tensor,
    position: tl.tensor,
    count: tl.tensor,
    parts: tl.tensor,
    q_head: tl.tensor,
    k_head: tl.tensor,
    k_row: tl.tensor,
    v_head: tl.tensor,
    v_row: tl.tensor,
    SHARING: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUES: tl.constexpr,
    ROWS: tl.constexpr,
    BW: tl.constexpr,
    BV: tl.constexpr,
    BN: tl.constexpr,
    CHUNK: tl.constexpr,
    FACTOR: tl.constexpr,
) -> None:
    """Program (h, p): part p of the positions for the SHARING query heads of keys and values h.

    sums [heads, parts, VALUES] fp32 of values, each weighted by 2 ** (score - the part's largest score); scales [heads,
    parts, 2] fp32: that largest score, and the sum of weights. FACTOR: of scores, with log2(e) in it.
    """
    head, part = tl.program_id(0), tl.program_id(1)
    count = filled(count, position)
    first = part * CHUNK
    if first < count:
        rows, w, e = tl.arange(0, ROWS), tl.arange(0, BW), tl.arange(0, BV)
        of = (head * SHARING + rows).to(tl.int64)
        known_row, known_w, known_e = rows < SHARING, w < WIDTH, e < VALUES
        x = tl.load(q + of[:, None] * q_head + w[None, :], mask=known_row[:, None] & known_w[None, :], other=0.0)
        keys, values = k + head.to(tl.int64) * k_head, v + head.to(tl.int64) * v_head
        most = tl.full((ROWS,), float("-inf"), tl.float32)
        weights, total = tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS, BV), tl.float32)
        for start in range(first, tl.minimum(first + CHUNK, count), BN):
            n = start + tl.arange(0, BN)
            known = n < count
            at = n.to(tl.int64)
            one = tl.load(keys + at[None, :] * k_row + w[:, None], mask=known[None, :] & known_w[:, None], other=0.0)
            scores = tl.dot(x, one, input_precision="ieee") * FACTOR
            scores = tl.where(known[None, :], scores, float("-inf"))
            higher = tl.maximum(most, tl.max(scores, 1))
            weight, fades = tl.exp2(scores - higher[:, None]), tl.exp2(most - higher)
            other = tl.load(
                values + at[:, None] * v_row + e[None, :], mask=known[:, None] & known_e[None, :], other=0.0
            )
            total = total * fades[:, None] + tl.dot(weight.to(other.dtype), other, input_precision="ieee")
            weights = weights * fades + tl.sum(weight, 1)
            most = higher
        place = of * parts + part
        tl.store(sums + place[:, None] * VALUES + e[None, :], total, mask=known_row[:, None] & known_e[None, :])
        tl.store(scales + 2 * place, most, mask=known_row)
        tl.store(scales + 2 * place + 1, weights, mask=known_row)


def _join_parts(
    sums: tl.tensor,
    scales: tl.tensor,
    out: tl.tensor,
    position: tl.tensor,
    count: tl.tensor,
    parts: tl.tensor,
    VALUES: tl.constexpr,
    BV: tl.constexpr,
    BP: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """Program h: the parts of query head h -> out [heads, VALUES], rounded once."""
    head, e, p = tl.program_id(0).to(tl.int64), tl.arange(0, BV), tl.arange(0, BP)
    full = (filled(count, position) + CHUNK - 1) // CHUNK
    most = tl.full((BP,), float("-inf"), tl.float32)
    for start in range(0, full, BP):
        known = start + p < full
        most = tl.maximum(most, tl.load(scales + 2 * (head * parts + start + p), mask=known, other=float("-inf")))
    highest = tl.max(most, 0)
    total, weights = tl.zeros((BV,), tl.float32), tl.zeros((BP,), tl.float32)
    for start in range(0, full, BP):
        known, place = start + p < full, head * parts + start + p
        share = tl.exp2(tl.load(scales + 2 * place, mask=known, other=float("-inf")) - highest)
        weights += share * tl.load(scales + 2 * place + 1, mask=known, other=0.0)
        some = tl.load(
            sums + place[:, None] * VALUES + e[None, :], mask=known[:, None] & (e < VALUES)[None, :], other=0.0
        )
        total += tl.sum(some * share[:, None], 0)
    result = total / tl.sum(weights, 0)
    tl.store(out + head * VALUES + e, result.to(out.dtype.element_ty), mask=e < VALUES)


attend_part, join_parts = triton.jit(_attend_part), triton.jit(_join_parts)
