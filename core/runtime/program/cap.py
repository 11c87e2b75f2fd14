"""Bounds of logits: each becomes cap * tanh(it / cap)."""

import functools

import torch

from core.memory.codec.fast.steps import named, single
from core.runtime.program.exp import tanh
from core.runtime.program.vectors import Kernel, number

FIELDS = ("x",)


@functools.cache
def kernel(width: int, cap: float) -> int:
    """The address of the kernel. A unit is a row of x [rows, width], fp32, which is written in place."""
    code = Kernel("cap")
    at = code.fields(FIELDS)
    with code.loop("%from", "%to") as row:
        x = code.at(at["x"], row.index, width * 4)
        for some in code.over(width):
            value = code.op("fdiv", code.read(x, *some.span, torch.float32), number(cap))
            value = code.op("fmul", tanh(code, value), number(cap))
            code.write(value, x, *some.span, torch.float32)
    return code.address()


def capped(logits: torch.Tensor, cap: float) -> None:
    """Bound logits [rows, V], fp32, in place."""
    single(kernel(logits.shape[1], cap), named(FIELDS, x=logits), len(logits))
