"""The weighted sum of a token's experts, `core.runtime.program.combine` in Triton: fma(weight, output, sum) in the
router's order from 0. Importing this module needs triton."""

import triton
import triton.language as tl

from core.memory.codec.fast.gpu.floats import rounded
from core.memory.codec.fast.gpu.product import numbered, rows
from core.runtime.program.gpu.exp import sigmoid


def _add(
    total: tl.tensor, y: tl.tensor, weights: tl.tensor, FIRST: tl.constexpr, COUNT: tl.constexpr, ALL: tl.constexpr
) -> tl.tensor:
    """Add y [deep, across, COUNT], the outputs of experts from the FIRST on; those from ALL on are none."""
    D: tl.constexpr = y.shape[0]
    T: tl.constexpr = y.shape[1]
    if FIRST < ALL:
        if COUNT == 1:
            y = tl.reshape(y, (D, T))
            total = tl.fma(tl.zeros_like(y) + tl.load(weights + FIRST), y, total)
        else:
            low, high = tl.split(tl.permute(tl.reshape(y, (D, T, 2, COUNT // 2)), (0, 1, 3, 2)))
            total = add(total, low, weights, FIRST, COUNT // 2, ALL)
            total = add(total, high, weights, FIRST + COUNT // 2, COUNT // 2, ALL)
    return total


add = triton.jit(_add)


def _down(
    x: tl.tensor,
    out: tl.tensor,
    bases: tl.tensor,
    ids: tl.tensor,
    weights: tl.tensor,
    stride: tl.tensor,
    CHOSEN: tl.constexpr,
    LANES: tl.constexpr,
    EXPERTS: tl.constexpr,
    F: tl.constexpr,
) -> None:
    """out[n] = the weighted sum of row n of each chosen expert's matrix times its own row of x, plus bias, rounded
    once. Rows of x are `stride` bytes apart. EXPERTS: CHOSEN or the next power of two. `bases`, `ids`, LANES: as in
    gemv.py.
    """
    X: tl.constexpr = x.dtype.element_ty
    lane = tl.minimum(tl.arange(0, EXPERTS), CHOSEN - 1)
    if LANES == 0:
        slots = tl.load(bases + tl.load(ids + lane))
    else:
        slots = lane.to(tl.int64) * 0 + bases[0]
        for i in tl.static_range(1, CHOSEN):
            slots = tl.where(lane == i, bases[i].to(tl.int64), slots)
    first = tl.program_id(0) * F.deep * F.across
    row = numbered(first, 0, F, F.outputs - 1)
    y = rows(slots, x.to(tl.int64) + lane * stride, row, X, EXPERTS, F)
    total = tl.zeros((F.deep, F.across), tl.float32)
    total = add(total, tl.permute(y, (0, 2, 1)), weights, 0, EXPERTS, CHOSEN)
    n = (first + tl.arange(0, F.deep) * F.across)[:, None] + tl.arange(0, F.across)[None, :]
    tl.store(out + n, rounded(total, out.dtype.element_ty), mask=n < F.outputs)


down = triton.jit(_down)


def _combine(
    experts: tl.tensor,
    pairs: tl.tensor,
    weights: tl.tensor,
    shared: tl.tensor,
    shared_gate: tl.tensor,
    out: tl.tensor,
    CHOSEN: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """out[t] = the sum over i of weights[t, i] * experts[pairs[t, i]], a pair of -1 left out, and the shared expert's
    output, by its gate where there is one. Programs: blocks of WIDTH, tokens."""
    token = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    known = n < WIDTH
    total = tl.zeros((BLOCK,), tl.float32)
    for i in range(CHOSEN):
        pair = tl.load(pairs + token * CHOSEN + i)
        value = tl.load(experts + tl.maximum(pair, 0) * WIDTH + n, mask=known, other=0)
        weight = tl.zeros((BLOCK,), tl.float32) + tl.load(weights + token * CHOSEN + i)
        total = tl.where(pair >= 0, tl.fma(weight, value, total), total)
    if shared is not None:
        more = tl.load(shared + token * WIDTH + n, mask=known, other=0)
        if shared_gate is not None:
            gate = sigmoid(tl.zeros((BLOCK,), tl.float32) + tl.load(shared_gate + token))
            total = tl.fma(gate, more, total)
        else:
            total += more
    tl.store(out + token * WIDTH + n, rounded(total, out.dtype.element_ty), mask=known)


combine = triton.jit(_combine)
