"""The activation of `core.runtime.program.gate` in Triton. Importing this module needs triton."""

import triton
import triton.language as tl

from core.runtime.program import gate as on_cpu
from core.runtime.program.gpu.exp import exp

GELU, CUBE = tl.constexpr(on_cpu.GELU), tl.constexpr(on_cpu.GELU * 0.044715)


def _gated(gate: tl.tensor, up: tl.tensor, SPEC: tl.constexpr) -> tl.tensor:
    """Hidden states of gates and ups in fp32. SPEC: core.runtime.program.gate.Gate."""
    if SPEC.limit != 0:
        if not SPEC.of_factors:
            gate = tl.where(gate > SPEC.limit, SPEC.limit, gate)
        up = tl.where(up > SPEC.limit, SPEC.limit, up)
        up = tl.where(up < -SPEC.limit, -SPEC.limit, up)
    if SPEC.activation == "relu":
        value = tl.where(gate < 0, 0.0, gate)
    elif SPEC.activation == "relu2":
        value = tl.where(gate < 0, 0.0, gate)
        value *= value
    else:
        if SPEC.activation == "silu":
            exponent = gate * -SPEC.slope
        else:
            square = gate * gate
            exponent = gate * tl.fma(square, tl.zeros_like(gate) + CUBE, tl.zeros_like(gate) + GELU)
        value = tl.div_rn(gate, 1.0 + exp(exponent))
    if SPEC.limit != 0 and SPEC.of_factors:
        value = tl.where(value > SPEC.limit, SPEC.limit, value)
    if SPEC.shift != 0:
        up += SPEC.shift
    return value * up


gated = triton.jit(_gated)
