"""Rows of plain numbers times rows of x, in the canonical order: A[k mod 8] = fma(W[k], x[k], A[k mod 8]). Importing
this module needs triton.

Tiles are those of codes: [deep, lanes, across, 8]. A thread has one of the eight sums of a row, so that a step reads
every eighth number: what lies between comes along in the same lines, and is read next, out of the cache.
"""

import triton
import triton.language as tl

from core.memory.codec.fast.gpu.floats import lanes, tree

AHEAD = tl.constexpr(8)  # steps whose numbers are read at once


def _plain_rows(
    slot: tl.tensor, x: tl.tensor, row: tl.tensor, X: tl.constexpr, LANES: tl.constexpr, F: tl.constexpr
) -> tl.tensor:
    """[deep, LANES, across]: as `coded_rows` of core.memory.codec.fast.gpu.codes. `x`: addresses of rows of
    plain numbers of type X."""
    sums = tl.zeros((row.shape[0], LANES, row.shape[1], 8), tl.float32)
    begin = (lanes(slot) + F.codes_at).to(tl.pointer_type(F.stored)) + (row * (1 if F.transposed else F.inputs))[
        :, None, :, None
    ]
    given = lanes(x).to(tl.pointer_type(X)) + tl.zeros((1, 1, row.shape[1], 1), tl.int32)
    STRIDE: tl.constexpr = F.outputs if F.transposed else 1
    for first in range(0, F.inputs // (8 * AHEAD) * 8 * AHEAD, 8 * AHEAD):
        for i in tl.static_range(AHEAD):
            k = (first + 8 * i + tl.arange(0, 8))[None, None, None, :]
            weight = tl.load(begin + k * STRIDE).to(tl.float32)
            sums = tl.fma(weight, tl.load(given + k).to(tl.float32), sums)
    for first in range(F.inputs // (8 * AHEAD) * 8 * AHEAD, F.inputs, 8):
        k = (first + tl.arange(0, 8))[None, None, None, :]
        known = k < F.inputs
        weight = tl.load(begin + k * STRIDE, mask=known, other=0).to(tl.float32)
        sums = tl.fma(weight, tl.load(given + k, mask=known, other=0).to(tl.float32), sums)
    return tree(sums)


plain_rows = triton.jit(_plain_rows)
