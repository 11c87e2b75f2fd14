"""What the gated delta rule takes, of each row: normed queries and keys, decays and learning rates.

Of a key head: q = (q * f(q)) * (1 / sqrt(width)) and k = k * f(k), where f(x) = 1 / sqrt(sum(x**2) + eps), and the sum
of q * k. Of a value head: decay = exp(-(exp(a_log) * softplus(a + dt_bias))), rate = 1 / (1 + exp(-b)).
"""

import functools
import math
from dataclasses import dataclass

import torch

from core.runtime.program.exp import exp, sigmoid, softplus
from core.runtime.program.vectors import FLOATS, ZERO, Kernel, number
from core.system.native.ir import fp32

FIELDS = ("mixed", "given", "a_columns", "b_columns", "a_log", "dt_bias", "products", "decays", "rates", "given_stride")
FP32 = torch.float32


@dataclass(frozen=True)
class DeltaInputs:
    """Of `key_heads` of `key_width` numbers and `value_heads`; `stride`: numbers of a row of `mixed`. `a_log` and
    `dt_bias`: the types that these are stored in."""

    key_heads: int
    key_width: int
    value_heads: int
    stride: int
    a_log: torch.dtype
    dt_bias: torch.dtype
    eps: float


@functools.cache
def kernel(spec: DeltaInputs) -> int:
    """The address of the kernel. A unit is a row: mixed [rows, stride] begins with queries, and then keys, [key_heads,
    key_width] each, which are normed in place. a and b of value head i are a_columns[i] and b_columns[i], i64, of a row
    of `given`, given_stride bytes from one to the next. products [rows, key_heads], decays and rates [rows,
    value_heads]. All are fp32."""
    code = Kernel("delta_inputs")
    at = code.fields(FIELDS, ("given_stride",))
    with code.loop("%from", "%to") as row:
        q = code.at(at["mixed"], row.index, spec.stride * 4)
        k = code.at(q, spec.key_heads * spec.key_width * 4)
        products = code.at(at["products"], row.index, spec.key_heads * 4)
        with code.loop(0, spec.key_heads) as head:
            one, other = (code.at(of, head.index, spec.key_width * 4) for of in (q, k))
            product = _norm(code, spec, one, other)
            code.store("float", product, code.at(products, head.index, 4), 4)
        given = code.at(at["given"], code.times(row.index, at["given_stride"]))
        decays, rates = (code.at(at[name], row.index, spec.value_heads * 4) for name in ("decays", "rates"))
        for some in code.over(spec.value_heads):
            first, count = some.span
            a, b = (_gathered(code, given, code.at(at[f"{name}_columns"], first, 8), count) for name in "ab")
            a = softplus(code, code.op("fadd", a, code.read(at["dt_bias"], first, count, spec.dt_bias)))
            slope = exp(code, code.read(at["a_log"], first, count, spec.a_log))
            exponent = code.let(f"fneg {FLOATS} {code.op('fmul', slope, a)}")
            code.write(exp(code, exponent), decays, first, count, FP32)
            code.write(sigmoid(code, b), rates, first, count, FP32)
    return code.address()


def _norm(code: Kernel, spec: DeltaInputs, q: str, k: str) -> str:
    """Norm a head's queries and keys in place -> the sum of their products."""
    for some in code.over(spec.key_width, [ZERO, ZERO]):
        seen = (code.read(of, *some.span, FP32) for of in (q, k))
        some.values = [code.fma(value, value, so_far) for value, so_far in zip(seen, some.values, strict=True)]
    factors = []
    for squares in some.values:
        size = code.let(f"fadd float {code.total(squares)}, {fp32(spec.eps)}")
        root = code.call("float", "llvm.sqrt.f32", ("float", size))
        factors.append(code.everywhere(code.let(f"fdiv float {fp32(1)}, {root}")))
    for some in code.over(spec.key_width, [ZERO]):
        one, other = (
            code.op("fmul", code.read(of, *some.span, FP32), factor) for of, factor in zip((q, k), factors, strict=True)
        )
        one = code.op("fmul", one, number(1 / math.sqrt(spec.key_width)))
        code.write(one, q, *some.span, FP32)
        code.write(other, k, *some.span, FP32)
        some.values = [code.fma(one, other, some.values[0])]
    return code.total(some.values[0])


def _gathered(code: Kernel, row: str, columns: str, count: int) -> str:
    """The numbers of a row at so many columns."""
    value = ZERO
    for i in range(count):
        column = code.load("i64", code.at(columns, 8 * i), 8)
        one = code.load("float", code.at(row, column, 4), 4)
        value = code.let(f"insertelement {FLOATS} {value}, float {one}, i32 {i}")
    return value
