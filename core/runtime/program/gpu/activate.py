"""The activation between the products of a dense layer, and the sum of rows with other rows. Importing this module
needs triton."""

import triton
import triton.language as tl

from core.runtime.program.gpu.gate import gated


def _activate(x: tl.tensor, out: tl.tensor, SPEC: tl.constexpr, BLOCK: tl.constexpr) -> None:
    """out [T, SPEC.width] from rows of gates and ups x [T, 2 * SPEC.width], fp32. SPEC: core.runtime.program.gate.Gate.
    Programs: blocks, rows."""
    row = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    known = n < SPEC.width
    x += row * 2 * SPEC.width
    if SPEC.interleaved:
        first, second = 2 * n, 2 * n + 1
    else:
        first, second = n, n + SPEC.width
    gate, up = tl.load(x + first, mask=known, other=0), tl.load(x + second, mask=known, other=0)
    tl.store(out + row * SPEC.width + n, gated(gate, up, SPEC), mask=known)


activate = triton.jit(_activate)
