"""The matrix between latents and the heads' keys and values, `core.runtime.program.absorb` in Triton. Importing this
module needs triton.

A program multiplies TOGETHER rows of x by what it unpacks of a head's part of the matrix."""

import triton
import triton.language as tl

from core.memory.codec.fast.gpu.floats import tree
from core.runtime.program.gpu.unpack import unpacked

AHEAD = tl.constexpr(8)  # steps whose weights are read at once


def _absorb(
    x: tl.tensor,
    slot: tl.tensor,
    table: tl.tensor,
    given: tl.tensor,
    row: tl.tensor,
    k: tl.tensor,
    known: tl.tensor,
    sums: tl.tensor,
    F: tl.constexpr,
) -> tl.tensor:
    """The sums after one number of each query. `given`: where it is in x, [TOGETHER]."""
    weight = unpacked(slot, table, row, k, known, F)[None, :] + tl.zeros_like(sums)
    return tl.fma(tl.load(x + given)[:, None] + tl.zeros_like(sums), weight, sums)


absorb = triton.jit(_absorb)


def _queries(
    x: tl.tensor,
    slot: tl.tensor,
    table: tl.tensor,
    out: tl.tensor,
    count: tl.tensor,
    x_stride: tl.tensor,
    A: tl.constexpr,
    F: tl.constexpr,
    TOGETHER: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """A: core.runtime.program.absorb.Absorb. Programs: blocks of a latent, heads, rows by TOGETHER. x [count, heads,
    keys + turned], rows x_stride numbers apart -> out [count, heads, latent + turned], fp32."""
    head = tl.program_id(1)
    rows = tl.program_id(2) * TOGETHER + tl.arange(0, TOGETHER)
    place = tl.minimum(rows, count - 1).to(tl.int64)
    given = place * x_stride + head * (A.keys + A.turned)
    first_row = head.to(tl.int64) * (A.keys + A.values)
    k = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    known = k < A.latent
    KEYS: tl.constexpr = A.keys
    WHOLE: tl.constexpr = KEYS // AHEAD * AHEAD
    sums = tl.zeros((TOGETHER, BLOCK), tl.float32)
    for first in range(0, WHOLE, AHEAD):
        for i in tl.static_range(AHEAD):
            sums = absorb(x, slot, table, given + (first + i), first_row + (first + i), k, known, sums, F)
    for i in tl.static_range(WHOLE, KEYS):
        sums = absorb(x, slot, table, given + i, first_row + i, k, known, sums, F)
    into = (place * A.heads + head) * (A.latent + A.turned)
    tl.store(out + into[:, None] + k[None, :], sums, mask=(rows < count)[:, None] & known[None, :])


queries = triton.jit(_queries)


def _add(
    x: tl.tensor,
    slot: tl.tensor,
    table: tl.tensor,
    given: tl.tensor,
    row: tl.tensor,
    k: tl.tensor,
    known: tl.tensor,
    sums: tl.tensor,
    F: tl.constexpr,
) -> tl.tensor:
    """The sums after eight numbers k [1, 8] of latents; `given`: where these begin in x, [TOGETHER]."""
    weight = unpacked(slot, table, row[:, None] + k * 0, k + row[:, None] * 0, known, F)[None, :, :]
    state = tl.load(x + (given[:, None, None] + k[None, :, :]), mask=known[None, :, :], other=0)
    return tl.fma(weight + tl.zeros_like(sums), state + tl.zeros_like(sums), sums)


add = triton.jit(_add)


def _values(
    x: tl.tensor,
    slot: tl.tensor,
    table: tl.tensor,
    out: tl.tensor,
    count: tl.tensor,
    A: tl.constexpr,
    F: tl.constexpr,
    TOGETHER: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Programs: blocks of a head's values, heads, rows by TOGETHER. x [count, heads, latent] -> out [count, heads,
    values], fp32."""
    head = tl.program_id(1)
    rows = tl.program_id(2) * TOGETHER + tl.arange(0, TOGETHER)
    place = tl.minimum(rows, count - 1).to(tl.int64)
    given = (place * A.heads + head) * A.latent
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = head.to(tl.int64) * (A.keys + A.values) + A.keys + tl.minimum(i, A.values - 1)
    lane = tl.arange(0, 8).to(tl.int64)[None, :]
    LATENT: tl.constexpr = A.latent
    WHOLE: tl.constexpr = LATENT // (8 * AHEAD) * 8 * AHEAD
    sums = tl.zeros((TOGETHER, BLOCK, 8), tl.float32)
    for first in range(0, WHOLE, 8 * AHEAD):
        for j in tl.static_range(AHEAD):
            k = lane + (first + 8 * j)
            sums = add(x, slot, table, given, row, k, k < LATENT, sums, F)
    for first in tl.static_range(WHOLE, LATENT, 8):
        k = lane + first
        sums = add(x, slot, table, given, row, k, k < LATENT, sums, F)
    found = tl.reshape(tree(tl.reshape(sums, (1, TOGETHER, BLOCK, 8))), (TOGETHER, BLOCK))
    into = out + ((place * A.heads + head) * A.values)[:, None] + i[None, :]
    tl.store(into, found, mask=(rows < count)[:, None] & (i < A.values)[None, :])


values = triton.jit(_values)
