"""The activation between an expert's products: a row of gates and ups -> its hidden states.

With g = gate and u = up, where there is a limit g = min(g, limit) and u = max(min(u, limit), -limit) first (where it
is of factors, the first factor is limited, not g):
    silu:       (g / (1 + exp(-slope * g))) * (u + shift)
    gelu_tanh:  (g / (1 + exp(g * fma(g * g, C * .044715, C)))) * (u + shift), C = -2 * sqrt(2 / pi)
    relu:       max(g, 0) * (u + shift)
    relu2:      max(g, 0) * max(g, 0) * (u + shift)
An expert without ups, whose first matrix is a plain one, has no second factor.
"""

import functools
import math
from dataclasses import dataclass
from typing import Literal

import torch

from core.runtime.program.exp import one_plus_exp
from core.runtime.program.vectors import FLOATS, LANES, Kernel, number

FIELDS = ("x", "out")
BLOCK = 256  # hidden states of a unit
GELU = -2 * math.sqrt(2 / math.pi)


@dataclass(frozen=True)
class Gate:
    """Of `width` hidden states. A row has all gates and then all ups, or, where `interleaved`, one of each in turn; or
    no ups. `limit` 0 = none; gpt-oss has slope 1.702, limit 7 and shift 1."""

    width: int
    activation: Literal["silu", "gelu_tanh", "relu", "relu2"] = "silu"
    interleaved: bool = False
    slope: float = 1.0
    limit: float = 0.0
    shift: float = 0.0
    ups: bool = True
    of_factors: bool = False

    @property
    def inputs(self) -> int:
        """Numbers of a row."""
        return self.width * (2 if self.ups else 1)

    @property
    def units(self) -> int:
        """Units of a row."""
        return -(-self.width // BLOCK)


@functools.cache
def kernel(spec: Gate) -> int:
    """The address of the kernel. Unit row * spec.units + i is block i of a row: x [rows, spec.inputs] and out
    [rows, width], fp32."""
    code, width = Kernel("gate"), spec.width
    at = code.fields(FIELDS)
    whole = width - width % LANES
    with code.loop("%from", "%to") as unit:
        row, block = (code.let(f"{name} i64 {unit.index}, {spec.units}") for name in ("udiv", "urem"))
        x, out = code.at(at["x"], row, spec.inputs * 4), code.at(at["out"], row, width * 4)
        start = code.times(block, BLOCK)
        end = code.least(code.add(start, BLOCK), str(whole))
        with code.loop(start, end, LANES) as each:
            _hidden(code, spec, x, out, each.index, LANES)
        if rest := width - whole:  # of the last block
            last = code.let(f"icmp eq i64 {block}, {spec.units - 1}")
            with code.where(last):
                _hidden(code, spec, x, out, whole, rest)
    return code.address()


def _hidden(code: Kernel, spec: Gate, x: str, out: str, first: str | int, count: int) -> None:
    """Compute some hidden states of a row."""
    if spec.interleaved:
        begin, left = code.at(x, first, 8), min(LANES, 2 * count)
        both = [code.read(begin, 0, left, torch.float32)]
        both.append(code.read(begin, left, 2 * count - left, torch.float32) if 2 * count > left else "zeroinitializer")
        gate, up = (code.pick(FLOATS, both[0], range(start, 2 * LANES, 2), both[1]) for start in (0, 1))
    else:
        gate = code.read(x, first, count, torch.float32)
        up = code.read(code.at(x, spec.width * 4), first, count, torch.float32) if spec.ups else ""
    if spec.limit and not spec.of_factors:
        gate = _bounded(code, gate, "ogt", spec.limit)
    value = _activated(code, spec, gate)
    if spec.limit and spec.of_factors:
        value = _bounded(code, value, "ogt", spec.limit)
    if spec.ups:
        if spec.limit:
            up = _bounded(code, _bounded(code, up, "ogt", spec.limit), "olt", -spec.limit)
        if spec.shift:
            up = code.op("fadd", up, number(spec.shift))
        value = code.op("fmul", value, up)
    code.write(value, out, first, count, torch.float32)


def _activated(code: Kernel, spec: Gate, gate: str) -> str:
    """The factor of gates."""
    if spec.activation in ("relu", "relu2"):
        value = _bounded(code, gate, "olt", 0.0)
        return code.op("fmul", value, value) if spec.activation == "relu2" else value
    if spec.activation == "silu":
        exponent = code.op("fmul", gate, number(-spec.slope))
    else:
        exponent = code.op("fmul", gate, code.fma(code.op("fmul", gate, gate), number(GELU * 0.044715), number(GELU)))
    return code.op("fdiv", gate, one_plus_exp(code, exponent))


def _bounded(code: Kernel, value: str, beyond: str, limit: float) -> str:
    """`limit` where a value is beyond it; NaN stays."""
    out = code.let(f"fcmp {beyond} {FLOATS} {value}, {number(limit)}")
    return code.let(f"select <{LANES} x i1> {out}, {FLOATS} {number(limit)}, {FLOATS} {value}")
