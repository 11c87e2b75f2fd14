"""exp in fp32 and what is made of it, with the operations of `core.runtime.program.exp`, one for one. Importing this
module needs triton."""

import math

import triton
import triton.language as tl

from core.runtime.program import exp as on_cpu

LEAST, MOST = tl.constexpr(on_cpu.LEAST), tl.constexpr(on_cpu.MOST)
SHIFT = tl.constexpr(on_cpu.SHIFT)
SHIFT_BITS = tl.constexpr(0x4B400000)  # of SHIFT in fp32
PER_LN2 = tl.constexpr(1 / math.log(2))
LN2, LN2_REST = tl.constexpr(-on_cpu.LN2), tl.constexpr(-on_cpu.LN2_REST)
DEGREE, ARTANH = tl.constexpr(on_cpu.DEGREE), tl.constexpr(on_cpu.ARTANH)
TERMS = tl.constexpr(tuple(1 / math.factorial(power) for power in range(on_cpu.DEGREE + 1)))


def _exp(x: tl.tensor) -> tl.tensor:
    """exp of fp32. NaN stays NaN."""
    x = tl.where(x < LEAST, LEAST, x)
    x = tl.where(x > MOST, MOST, x)
    zero = tl.zeros_like(x)
    shifted = tl.fma(x, zero + PER_LN2, zero + SHIFT)
    n = shifted - SHIFT
    r = tl.fma(n, zero + LN2, x)
    r = tl.fma(n, zero + LN2_REST, r)
    value = zero + TERMS[DEGREE]
    for i in tl.static_range(DEGREE):
        value = tl.fma(value, r, zero + TERMS[DEGREE - 1 - i])
    whole = shifted.to(tl.int32, bitcast=True) - SHIFT_BITS
    half = whole >> 1
    value *= ((half + 127) << 23).to(tl.float32, bitcast=True)
    return value * ((whole - half + 127) << 23).to(tl.float32, bitcast=True)


exp = triton.jit(_exp)


def _sigmoid(x: tl.tensor) -> tl.tensor:
    """1 / (1 + exp(-x))."""
    return tl.div_rn(tl.zeros_like(x) + 1.0, 1.0 + exp(-x))


sigmoid = triton.jit(_sigmoid)


def _softplus(x: tl.tensor) -> tl.tensor:
    """max(x, 0) + 2 * artanh(s), where s = t / (2 + t) and t = exp(-|x|)."""
    t = exp(-tl.abs(x))
    s = tl.div_rn(t, t + 2.0)
    square = s * s
    value = tl.zeros_like(x) + 1 / (2 * ARTANH + 1)
    for i in tl.static_range(ARTANH):
        value = tl.fma(value, square, tl.zeros_like(x) + 1 / (2 * (ARTANH - 1 - i) + 1))
    return tl.fma(s + s, value, tl.where(x > 0, x, 0.0))


softplus = triton.jit(_softplus)
