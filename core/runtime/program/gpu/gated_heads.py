"""Heads times the activation of their gates, `core.runtime.program.gated_heads` in Triton. Importing this module needs
triton."""

import triton
import triton.language as tl

from core.runtime.program.gpu.exp import exp, sigmoid, softplus
from core.runtime.program.gpu.rms import factor_of, scaled


def _gated_heads(
    x: tl.tensor,
    gates: tl.tensor,
    columns: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    gates_stride: tl.tensor,
    S: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """S: core.runtime.program.gated_heads.GatedHeads. Programs: heads, rows. x and out [rows, S.heads, S.width]; the
    gates of head i are columns[i], int64, and those after it, or that alone, of a row of `gates`, gates_stride numbers
    from one to the next. All are fp32."""
    head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    W: tl.constexpr = S.width
    x += (row * S.heads + head) * W
    gates += row * gates_stride + tl.load(columns + head)
    at = tl.arange(0, BLOCK)
    known = at < W
    value = tl.load(x + at, mask=known, other=0)
    gate = tl.load(gates + tl.zeros_like(at) if S.whole else gates + at, mask=known, other=0)
    if S.norm is not None:
        squares = tl.zeros((8,), tl.float32)
        for first in tl.static_range(0, W, 8):
            k = first + tl.arange(0, 8)
            some = tl.load(x + k, mask=k < W, other=0)
            squares = tl.fma(some, some, squares)
        value = scaled(value, factor_of(squares, W, S.norm.eps), weight, at, known, S.norm.offset)
    if S.activation == "softplus":
        value *= softplus(gate)
    elif S.activation == "silu":
        value *= tl.div_rn(gate, 1.0 + exp(-gate))
    else:
        value *= sigmoid(gate)
    tl.store(out + (row * S.heads + head) * W + at, value, mask=known)


gated_heads = triton.jit(_gated_heads)
