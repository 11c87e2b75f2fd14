"""RMSNorm of rows, after adding another row to each where that is wanted.

With r = x, or r = x + delta, or r = fma(scale, delta, x), which is stored back to x, times a factor where there is one:
out = ((r * (1 / sqrt(sum(r**2) / width + eps))) * w), rounded once.
"""

import functools
from dataclasses import dataclass

import torch

from core.runtime.program.vectors import ZERO, Kernel, number
from core.system.native.ir import fp32

FIELDS = ("x", "delta", "weight", "out", "x_stride", "out_stride", "factor")


@dataclass(frozen=True)
class Norm:
    """Of `width` numbers. `weight` is the type that weights are stored in, None = there are none; `offset`: the factor
    is 1 + weight."""

    width: int
    eps: float
    weight: torch.dtype | None = None
    offset: bool = False


@dataclass(frozen=True)
class Rms:
    """A norm of rows in fp32. `adds`: of x + scale * delta, which is stored in x; `factor`: times a number."""

    norm: Norm
    out: torch.dtype = torch.float32
    adds: bool = False
    scale: float = 1.0
    factor: bool = False

    def __post_init__(self) -> None:
        assert self.adds or not self.factor


@functools.cache
def kernel(spec: Rms) -> int:
    """The address of the kernel. A unit is a row: at x + row * x_stride bytes, fp32; its result at out + row *
    out_stride bytes; delta [rows, width] and the factor at its address, fp32."""
    code, width = Kernel("rms"), spec.norm.width
    at = code.fields(FIELDS, ("x_stride", "out_stride"))
    times = code.everywhere(code.load("float", at["factor"], 4)) if spec.factor else ""
    with code.loop("%from", "%to") as row:
        x = code.at(at["x"], code.times(row.index, at["x_stride"]))
        out = code.at(at["out"], code.times(row.index, at["out_stride"]))
        delta = code.at(at["delta"], row.index, width * 4) if spec.adds else ""
        for some in code.over(width, [ZERO]):
            value = code.read(x, *some.span, torch.float32)
            if spec.adds:
                more = code.read(delta, *some.span, torch.float32)
                plain = spec.scale == 1
                value = code.op("fadd", value, more) if plain else code.fma(number(spec.scale), more, value)
                value = code.op("fmul", value, times) if times else value
                code.write(value, x, *some.span, torch.float32)
            some.values = [code.fma(value, value, some.values[0])]
        factor = scale(code, spec.norm, some.values[0])
        for some in code.over(width):
            value = code.read(x, *some.span, torch.float32)
            value = scaled(code, spec.norm, value, factor, at["weight"], *some.span)
            code.write(value, out, *some.span, spec.out)
    return code.address()


def scale(code: Kernel, norm: Norm, squares: str) -> str:
    """1 / sqrt(mean of squares + eps) in every lane, from the eight partial sums of squares."""
    mean = code.let(f"fdiv float {code.total(squares)}, {fp32(norm.width)}")
    root = code.call("float", "llvm.sqrt.f32", ("float", code.let(f"fadd float {mean}, {fp32(norm.eps)}")))
    return code.everywhere(code.let(f"fdiv float {fp32(1)}, {root}"))


def scale_of(code: Kernel, norm: Norm, x: str) -> str:
    """The same of numbers in fp32."""
    for some in code.over(norm.width, [ZERO]):
        value = code.read(x, *some.span, torch.float32)
        some.values = [code.fma(value, value, some.values[0])]
    return scale(code, norm, some.values[0])


def scaled(code: Kernel, norm: Norm, value: str, factor: str, weight: str, first: str | int, count: int) -> str:
    """Some numbers of a row after the norm."""
    value = code.op("fmul", value, factor)
    if norm.weight is None:
        return value
    weights = code.read(weight, first, count, norm.weight)
    if norm.offset:
        weights = code.op("fadd", weights, number(1))
    return code.op("fmul", value, weights)
