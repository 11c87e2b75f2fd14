"""The heads of a mixer's output times the activation of their gates, after a norm of each where there is one.

With x and g a number of a head and its gate: y = x, or (x * (1 / sqrt(sum(x**2) / width + eps))) * w, and then
    silu:    y * (g / (1 + exp(-g)))
    sigmoid: y * (1 / (1 + exp(-g)))
"""

import functools
from dataclasses import dataclass
from typing import Literal

import torch

from core.runtime.program.exp import one_plus_exp
from core.runtime.program.rms import Norm, scale_of, scaled
from core.runtime.program.vectors import FLOATS, Kernel, number

FIELDS = ("x", "gates", "columns", "weight", "gates_stride")
FP32 = torch.float32


@dataclass(frozen=True)
class GatedHeads:
    """`heads` of `width` numbers."""

    heads: int
    width: int
    activation: Literal["silu", "sigmoid"]
    norm: Norm | None = None

    def __post_init__(self) -> None:
        assert self.norm is None or self.norm.width == self.width


@functools.cache
def kernel(spec: GatedHeads) -> int:
    """The address of the kernel. Unit row * heads + i is head i of a row: x [rows, heads, width], in place. Its gates
    are columns[i], i64, and those after it, of a row of `gates`, gates_stride bytes from one to the next. All are
    fp32."""
    code = Kernel("gated_heads")
    at = code.fields(FIELDS, ("gates_stride",))
    with code.loop("%from", "%to") as unit:
        row, head = (code.let(f"{name} i64 {unit.index}, {spec.heads}") for name in ("udiv", "urem"))
        x = code.at(at["x"], unit.index, spec.width * 4)
        gates = code.at(at["gates"], code.times(row, at["gates_stride"]))
        gates = code.at(gates, code.integer(at["columns"], head), 4)
        factor = spec.norm and scale_of(code, spec.norm, x)
        for some in code.over(spec.width):
            value, gate = (code.read(of, *some.span, FP32) for of in (x, gates))
            if spec.norm and factor:
                value = scaled(code, spec.norm, value, factor, at["weight"], *some.span)
            divisor = one_plus_exp(code, code.let(f"fneg {FLOATS} {gate}"))
            gate = code.op("fdiv", gate if spec.activation == "silu" else number(1), divisor)
            code.write(code.op("fmul", value, gate), x, *some.span, FP32)
    return code.address()
