"""RMSNorm of rows, after adding another row to each where that is wanted.

With r = x, or r = x + delta, or r = fma(scale, delta, x), which is stored back to x, times a factor where there is one:
out = ((r * (1 / sqrt(sum(r**2) / width + eps))) * w), rounded once.
"""

import functools
from dataclasses import dataclass

import torch

from core.runtime.program.vectors import (
    ZERO,
    code_address,
    everywhere,
    fields,
    fma,
    kernel_code,
    load,
    number,
    op,
    over,
    store,
    total,
)
from core.system.native.ir import Code, fp32

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
    code, width = kernel_code("rms"), spec.norm.width
    at = fields(code, FIELDS, ("x_stride", "out_stride"))
    times = everywhere(code, code.load("float", at["factor"], 4)) if spec.factor else ""
    with code.loop("%from", "%to") as row:
        x = code.at(at["x"], code.let(f"mul i64 {row.index}, {at['x_stride']}"))
        out = code.at(at["out"], code.let(f"mul i64 {row.index}, {at['out_stride']}"))
        delta = code.at(at["delta"], row.index, width * 4) if spec.adds else ""

        def square(first: str | int, count: int, values: list[str], x: str = x, delta: str = delta) -> list[str]:
            value = load(code, x, first, count, torch.float32)
            if spec.adds:
                more = load(code, delta, first, count, torch.float32)
                scaled = spec.scale != 1
                value = fma(code, number(spec.scale), more, value) if scaled else op(code, "fadd", value, more)
                value = op(code, "fmul", value, times) if times else value
                store(code, value, x, first, count, torch.float32)
            return [fma(code, value, value, values[0])]

        factor = scale(code, spec.norm, over(code, width, square, [ZERO])[0])

        def put(
            first: str | int, count: int, values: list[str], x: str = x, out: str = out, f: str = factor
        ) -> list[str]:
            value = scaled(code, spec.norm, load(code, x, first, count, torch.float32), f, at["weight"], first, count)
            store(code, value, out, first, count, spec.out)
            return []

        over(code, width, put)
    return code_address(code)


def scale(code: Code, norm: Norm, squares: str) -> str:
    """1 / sqrt(mean of squares + eps) in every lane, from the eight partial sums of squares."""
    mean = code.let(f"fdiv float {total(code, squares)}, {fp32(norm.width)}")
    root = code.call("float", "llvm.sqrt.f32", ("float", code.let(f"fadd float {mean}, {fp32(norm.eps)}")))
    return everywhere(code, code.let(f"fdiv float {fp32(1)}, {root}"))


def scaled(code: Code, norm: Norm, value: str, factor: str, weight: str, first: str | int, count: int) -> str:
    """Some numbers of a row after the norm."""
    value = op(code, "fmul", value, factor)
    if norm.weight is None:
        return value
    weights = load(code, weight, first, count, norm.weight)
    if norm.offset:
        weights = op(code, "fadd", weights, number(1))
    return op(code, "fmul", value, weights)
