"""Rows of a table by their numbers, in fp32: embeddings by tokens, angles by positions."""

import functools
from dataclasses import dataclass

import torch

from core.runtime.program.vectors import code_address, fields, kernel_code, load, number, op, over, store

FIELDS = ("table", "indices", "out")


@dataclass(frozen=True)
class Gather:
    """Of `width` numbers each, times `scale`."""

    width: int
    dtype: torch.dtype = torch.float32
    scale: float = 1.0


@functools.cache
def kernel(spec: Gather) -> int:
    """The address of the kernel. A unit is a row: table [rows, width] of `dtype`, indices [units], i64 -> out [units,
    width], fp32."""
    code = kernel_code("gather")
    at = fields(code, FIELDS)
    with code.loop("%from", "%to") as row:
        index = code.load("i64", code.at(at["indices"], row.index, 8), 8)
        source = code.at(at["table"], index, spec.width * spec.dtype.itemsize)
        out = code.at(at["out"], row.index, spec.width * 4)

        def put(first: str | int, count: int, values: list[str], source: str = source, out: str = out) -> list[str]:
            value = load(code, source, first, count, spec.dtype)
            if spec.scale != 1:
                value = op(code, "fmul", value, number(spec.scale))
            store(code, value, out, first, count, torch.float32)
            return []

        over(code, spec.width, put)
    return code_address(code)
