"""Bounds of logits: each becomes cap * tanh(it / cap)."""

import functools

import torch

from core.memory.codec.fast.steps import named, single
from core.runtime.program.exp import tanh
from core.runtime.program.vectors import code_address, fields, kernel_code, load, number, op, over, store

FIELDS = ("x",)


@functools.cache
def kernel(width: int, cap: float) -> int:
    """The address of the kernel. A unit is a row of x [rows, width], fp32, which is written in place."""
    code = kernel_code("cap")
    at = fields(code, FIELDS)
    with code.loop("%from", "%to") as row:
        x = code.at(at["x"], row.index, width * 4)

        def some(first: str | int, count: int, values: list[str], x: str = x) -> list[str]:
            value = op(code, "fdiv", load(code, x, first, count, torch.float32), number(cap))
            value = op(code, "fmul", tanh(code, value), number(cap))
            store(code, value, x, first, count, torch.float32)
            return []

        over(code, width, some)
    return code_address(code)


def capped(logits: torch.Tensor, cap: float) -> None:
    """Bound logits [rows, V], fp32, in place."""
    single(kernel(logits.shape[1], cap), named(FIELDS, x=logits.data_ptr()), len(logits))
