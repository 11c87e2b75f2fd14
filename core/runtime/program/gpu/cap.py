"""Bounds of logits, `core.runtime.program.cap` in Triton. Importing this module needs triton."""

import triton
import triton.language as tl

from core.runtime.program.gpu.exp import exp


def _tanh(x: tl.tensor) -> tl.tensor:
    """1 - 2 / (1 + exp(2x))."""
    return 1.0 - tl.div_rn(tl.zeros_like(x) + 2.0, 1.0 + exp(x + x))


tanh = triton.jit(_tanh)


def _cap(x: tl.tensor, count: tl.tensor, CAP: tl.constexpr, BLOCK: tl.constexpr) -> None:
    """Each of `count` numbers x, fp32, becomes CAP * tanh(it / CAP), in place. Programs: blocks."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < count, other=0)
    value = tanh(tl.div_rn(value, tl.full((BLOCK,), CAP, tl.float32))) * CAP
    tl.store(x + at, value, mask=at < count)


cap = triton.jit(_cap)
