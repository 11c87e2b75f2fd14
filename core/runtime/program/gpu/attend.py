"""Attention of rows over the KV cache, `core.runtime.program.attend` in Triton: two kernels, of scores, and of weights
and weighted values. Importing this module needs triton.

What one block of keys does to the outputs depends on the greatest score until then, and on nothing else of the blocks
before: scores are computed for all blocks at once, and only the sums are taken in order. The number of positions is on
the device. S is `core.runtime.program.attend_block.Attend`, without a soft cap.

    scores   [rows, query_heads, span, BLOCK] fp32
    greatest [rows, query_heads, span] fp32: of each block
    weights  [rows, query_heads, slices, BLOCK] fp32: of the block whose values a program adds
"""

import triton
import triton.language as tl

from core.memory.codec.fast.gpu.floats import tree
from core.runtime.program import attend_block
from core.runtime.program.gpu.exp import exp
from core.runtime.program.gpu.rms import total

BLOCK = tl.constexpr(attend_block.BLOCK)
NONE = tl.constexpr(float("-inf"))
AHEAD = tl.constexpr(32)  # values that are read at once
SPAN = tl.constexpr(64)  # numbers of a key that are


def _reach(positions: tl.tensor, row: tl.tensor, window: tl.tensor) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The keys begin..end - 1 that a row reads, and the first block of them."""
    end = tl.load(positions + row) + 1
    begin = tl.maximum(end - window, 0)
    return begin, end, begin // BLOCK


reach = triton.jit(_reach)


def _dots(given: tl.tensor, keys: tl.tensor, sums: tl.tensor, W: tl.constexpr, BLOCKED: tl.constexpr) -> tl.tensor:
    """The partial sums [TOGETHER, BLOCK, 8] after W numbers of queries, and of keys, at pointers to the first eight."""
    zeros = tl.zeros((1, BLOCKED, 1), tl.float32)
    for start in range(0, W // SPAN * SPAN, SPAN):
        for at in tl.static_range(0, SPAN, 8):
            states = tl.load(given + (start + at)) + zeros
            sums = tl.fma(states, tl.load(keys + (start + at)).to(tl.float32), sums)
    for at in tl.static_range(W // SPAN * SPAN, W // 8 * 8, 8):
        sums = tl.fma(tl.load(given + at) + zeros, tl.load(keys + at).to(tl.float32), sums)
    if W % 8:
        known = (tl.arange(0, 8) < W % 8)[None, None, :]
        states = tl.load(given + W // 8 * 8, mask=known, other=0) + zeros
        sums = tl.fma(states, tl.load(keys + W // 8 * 8, mask=known, other=0).to(tl.float32), sums)
    return sums


dots = triton.jit(_dots)


def _score(
    q: tl.tensor,
    k_at: tl.tensor,
    positions: tl.tensor,
    scores: tl.tensor,
    greatest: tl.tensor,
    window: tl.tensor,
    k_head: tl.tensor,
    k_row: tl.tensor,
    span: tl.tensor,
    more_at: tl.tensor,
    more_row: tl.tensor,
    CACHE: tl.constexpr,
    S: tl.constexpr,
    TOGETHER: tl.constexpr,
) -> None:
    """Scores of each block, those out of reach as -inf, and the greatest of them. Programs: parts of the blocks; heads
    of keys times shares of TOGETHER queries that read them; rows. q [rows, query_heads, width + more], fp32; keys as in
    rotate.py, and what heads share of them at `more_at` + p * more_row bytes."""
    G: tl.constexpr = S.group
    SHARES: tl.constexpr = (G + TOGETHER - 1) // TOGETHER
    W: tl.constexpr = S.width
    head, row = tl.program_id(1) // SHARES, tl.program_id(2).to(tl.int64)
    one = tl.program_id(1) % SHARES * TOGETHER + tl.arange(0, TOGETHER)
    query = row * S.query_heads + head * G + tl.minimum(one, G - 1)
    begin, end, first = reach(positions, row, window)
    lane = tl.arange(0, 8)
    given = q + (query * (W + S.more))[:, None, None] + lane[None, None, :]
    for block in range(tl.program_id(0), (end + BLOCK - 1) // BLOCK - first, tl.num_programs(0)):
        key = (first + block) * BLOCK + tl.arange(0, BLOCK)
        within = (key >= begin) & (key < end)
        place = tl.minimum(tl.maximum(key, begin), end - 1)
        if S.ring:
            place = place % S.ring
        keys = (k_at + head * k_head + place * k_row).to(tl.pointer_type(CACHE))
        keys = keys[None, :, None] + lane[None, None, :]
        sums = tl.zeros((TOGETHER, BLOCK, 8), tl.float32)
        sums = dots(given, keys, sums, W, BLOCK)
        if S.more:
            shared = (more_at + place * more_row).to(tl.pointer_type(CACHE))
            sums = dots(given + W, shared[None, :, None] + lane[None, None, :], sums, S.more, BLOCK)
        found = tl.reshape(tree(tl.reshape(sums, (1, TOGETHER, BLOCK, 8))), (TOGETHER, BLOCK)) * S.scale
        found = tl.where(within[None, :], found, NONE)
        into = query * span + block
        some = one < G
        tl.store(scores + (into * BLOCK)[:, None] + tl.arange(0, BLOCK)[None, :], found, mask=some[:, None])
        tl.store(greatest + into, tl.max(tl.where(found == found, found, NONE), 1), mask=some)


score = triton.jit(_score)


def _add_values(
    v_at: tl.tensor,
    positions: tl.tensor,
    sinks: tl.tensor,
    scores: tl.tensor,
    greatest: tl.tensor,
    weights: tl.tensor,
    out: tl.tensor,
    window: tl.tensor,
    v_head: tl.tensor,
    v_row: tl.tensor,
    span: tl.tensor,
    CACHE: tl.constexpr,
    S: tl.constexpr,
    SLICE: tl.constexpr,
) -> None:
    """out [rows, query_heads, values], fp32: the values by their weights, divided by the weights' sum. Programs: slices
    of the values, query heads, rows. Each turns scores into weights by itself: its threads pass them to each other in
    `weights`."""
    row, head = tl.program_id(2).to(tl.int64), tl.program_id(1)
    query = row * S.query_heads + head
    begin, end, first = reach(positions, row, window)
    n = tl.program_id(0) * SLICE + tl.arange(0, SLICE)
    values = (v_at + head // S.group * v_head).to(tl.pointer_type(CACHE)) + tl.minimum(n, S.values - 1)
    STEP: tl.constexpr = CACHE.primitive_bitwidth // 8
    apart = v_row // STEP
    at = weights + (query * tl.num_programs(0) + tl.program_id(0)) * BLOCK
    most = tl.load(sinks + head) if S.sinks else NONE + tl.zeros((), tl.float32)  # a sink that is NaN stays
    sums = tl.zeros((SLICE,), tl.float32)
    lane = tl.arange(0, 8)
    divisor = tl.where(lane == 0, 1.0, 0.0) if S.sinks else tl.zeros((8,), tl.float32)
    for block in range((end + BLOCK - 1) // BLOCK - first):
        found = tl.load(greatest + query * span + block)
        now = tl.where(found > most, found, most)
        less = tl.where(now == NONE, 0.0, now)
        factor = exp(most - less)
        most = now
        own = tl.load(scores + (query * span + block) * BLOCK + tl.arange(0, BLOCK))
        tl.debug_barrier()  # all threads have read the weights of the block before
        tl.store(at + tl.arange(0, BLOCK), exp(own - less))
        tl.debug_barrier()
        divisor *= factor
        for i in tl.static_range(BLOCK // 8):
            divisor += tl.load(at + 8 * i + lane)
        sums *= factor
        start = (first + block) * BLOCK
        from_, until = tl.maximum(begin - start, 0), tl.minimum(end - start, BLOCK)
        some = values + (start % S.ring if S.ring else start) * apart
        if until - from_ == BLOCK:
            for key in range(0, BLOCK, AHEAD):
                for i in tl.static_range(AHEAD):
                    value = tl.load(some + (key + i) * apart).to(tl.float32)
                    sums = tl.fma(tl.zeros_like(sums) + tl.load(at + key + i), value, sums)
        else:
            for one in range(from_, until):
                value = tl.load(some + one * apart).to(tl.float32)
                sums = tl.fma(tl.zeros_like(sums) + tl.load(at + one), value, sums)
    tl.store(out + query * S.values + n, tl.div_rn(sums, total(divisor)), mask=n < S.values)


add_values = triton.jit(_add_values)
