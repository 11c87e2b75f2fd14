"""What the gated delta rule takes, of each row: normed queries and keys, decays and learning rates.

Of a key head: q = (q * f(q)) * (1 / sqrt(width)) and k = k * f(k), where f(x) = 1 / sqrt(sum(x**2) + eps), and the sum
of q * k. Of a value head: decay = exp(-(exp(a_log) * softplus(a + dt_bias))), rate = 1 / (1 + exp(-b)).
"""

import functools
import math
from dataclasses import dataclass

import torch

from core.runtime.program.exp import exp, sigmoid, softplus
from core.runtime.program.vectors import (
    FLOATS,
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
    code = kernel_code("delta_inputs")
    at = fields(code, FIELDS, ("given_stride",))
    with code.loop("%from", "%to") as row:
        q = code.at(at["mixed"], row.index, spec.stride * 4)
        k = code.at(q, spec.key_heads * spec.key_width * 4)
        products = code.at(at["products"], row.index, spec.key_heads * 4)
        with code.loop(0, spec.key_heads) as head:
            one, other = (code.at(of, head.index, spec.key_width * 4) for of in (q, k))
            product = _norm(code, spec, one, other)
            code.store("float", product, code.at(products, head.index, 4), 4)
        given = code.at(at["given"], code.let(f"mul i64 {row.index}, {at['given_stride']}"))
        decays, rates = (code.at(at[name], row.index, spec.value_heads * 4) for name in ("decays", "rates"))

        def put(
            first: str | int,
            count: int,
            values: list[str],
            given: str = given,
            decays: str = decays,
            rates: str = rates,
        ) -> list[str]:
            a, b = (_gathered(code, given, code.at(at[f"{name}_columns"], first, 8), count) for name in "ab")
            a = softplus(code, op(code, "fadd", a, load(code, at["dt_bias"], first, count, spec.dt_bias)))
            slope = exp(code, load(code, at["a_log"], first, count, spec.a_log))
            exponent = code.let(f"fneg {FLOATS} {op(code, 'fmul', slope, a)}")
            store(code, exp(code, exponent), decays, first, count, FP32)
            store(code, sigmoid(code, b), rates, first, count, FP32)
            return []

        over(code, spec.value_heads, put)
    return code_address(code)


def _norm(code: Code, spec: DeltaInputs, q: str, k: str) -> str:
    """Norm a head's queries and keys in place -> the sum of their products."""

    def square(first: str | int, count: int, values: list[str]) -> list[str]:
        return [
            fma(code, value, value, so_far)
            for value, so_far in zip((load(code, of, first, count, FP32) for of in (q, k)), values, strict=True)
        ]

    factors = []
    for squares in over(code, spec.key_width, square, [ZERO, ZERO]):
        size = code.let(f"fadd float {total(code, squares)}, {fp32(spec.eps)}")
        root = code.call("float", "llvm.sqrt.f32", ("float", size))
        factors.append(everywhere(code, code.let(f"fdiv float {fp32(1)}, {root}")))

    def put(first: str | int, count: int, values: list[str]) -> list[str]:
        one, other = (
            op(code, "fmul", load(code, of, first, count, FP32), factor)
            for of, factor in zip((q, k), factors, strict=True)
        )
        one = op(code, "fmul", one, number(1 / math.sqrt(spec.key_width)))
        store(code, one, q, first, count, FP32)
        store(code, other, k, first, count, FP32)
        return [fma(code, one, other, values[0])]

    return total(code, over(code, spec.key_width, put, [ZERO])[0])


def _gathered(code: Code, row: str, columns: str, count: int) -> str:
    """The numbers of a row at so many columns."""
    value = ZERO
    for i in range(count):
        column = code.load("i64", code.at(columns, 8 * i), 8)
        one = code.load("float", code.at(row, column, 4), 4)
        value = code.let(f"insertelement {FLOATS} {value}, float {one}, i32 {i}")
    return value
