"""A bias, added to each row of a product's results."""

import functools
from dataclasses import dataclass

import torch

from core.memory.codec.fast.products import COUNT, GIVEN, INTO
from core.runtime.program.vectors import Kernel

FIELDS = ("given", "slots")


@dataclass(frozen=True)
class Bias:
    """Of `width` numbers, `at` bytes after the start of a slot; one in `every` slots has it."""

    width: int
    dtype: torch.dtype
    at: int = 0
    every: int = 1


@functools.cache
def kernel(spec: Bias) -> int:
    """The address of the kernel. A unit is a slot with a bias: `given` and `slots` are those of the product
    (`CanonicalProducts`), whose results are fp32."""
    code = Kernel("bias")
    at = code.fields(FIELDS)
    with code.loop("%from", "%to") as slot:
        header = code.at(at["given"], slot.index, 8 * GIVEN)
        count, row = (code.load("i64", code.at(header, 8 * i), 8) for i in (COUNT, GIVEN - 1))
        into = code.load("ptr", code.at(header, 8 * INTO), 8)
        bias = code.at(code.load("ptr", code.at(at["slots"], slot.index, 8 * spec.every), 8), spec.at)
        with code.loop(0, count) as each:
            out = code.at(into, code.times(each.index, row))
            for some in code.over(spec.width):
                value = code.read(out, *some.span, torch.float32)
                value = code.op("fadd", value, code.read(bias, *some.span, spec.dtype))
                code.write(value, out, *some.span, torch.float32)
    return code.address()
