"""The heads of a mixer's output times the activation of their gates, after a norm of each where there is one.

With x and g a number of a head and its gate: y = x, or (x * (1 / sqrt(sum(x**2) / width + eps))) * w, and then
    silu:     y * (g / (1 + exp(-g)))
    sigmoid:  y * (1 / (1 + exp(-g)))
    softplus: y * log(1 + exp(g))
"""

import functools
from dataclasses import dataclass
from typing import Literal

import torch

from core.runtime.program.exp import one_plus_exp, softplus
from core.runtime.program.rms import Norm, scale_of, scaled
from core.runtime.program.vectors import FLOATS, Kernel, number

FIELDS = ("x", "gates", "columns", "weight", "gates_stride")
FP32 = torch.float32


@dataclass(frozen=True)
class GatedHeads:
    """`heads` of `width` numbers. `whole`: a gate is of a whole head."""

    heads: int
    width: int
    activation: Literal["silu", "sigmoid", "softplus"]
    norm: Norm | None = None
    whole: bool = False

    def __post_init__(self) -> None:
        assert self.norm is None or self.norm.width == self.width


@functools.cache
def kernel(spec: GatedHeads) -> int:
    """The address of the kernel. Unit row * heads + i is head i of a row: x [rows, heads, width], in place. Its gates
    are columns[i], i64, and those after it, or that alone, of a row of `gates`, gates_stride bytes from one to the
    next. All are fp32."""
    code = Kernel("gated_heads")
    at = code.fields(FIELDS, ("gates_stride",))
    with code.loop("%from", "%to") as unit:
        row, head = (code.let(f"{name} i64 {unit.index}, {spec.heads}") for name in ("udiv", "urem"))
        x = code.at(at["x"], unit.index, spec.width * 4)
        gates = code.at(at["gates"], code.times(row, at["gates_stride"]))
        gates = code.at(gates, code.integer(at["columns"], head), 4)
        factor = spec.norm and scale_of(code, spec.norm, x)
        for some in code.over(spec.width):
            value = code.read(x, *some.span, FP32)
            gate = code.spread(gates, "0") if spec.whole else code.read(gates, *some.span, FP32)
            if spec.norm and factor:
                value = scaled(code, spec.norm, value, factor, at["weight"], *some.span)
            code.write(code.op("fmul", value, _factor(code, spec, gate)), x, *some.span, FP32)
    return code.address()


def _factor(code: Kernel, spec: GatedHeads, gate: str) -> str:
    if spec.activation == "softplus":
        return softplus(code, gate)
    divisor = one_plus_exp(code, code.let(f"fneg {FLOATS} {gate}"))
    return code.op("fdiv", gate if spec.activation == "silu" else number(1), divisor)
