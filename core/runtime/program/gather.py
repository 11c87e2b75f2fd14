"""Rows of a table by their numbers, in fp32: embeddings by tokens, angles by positions."""

import functools
from dataclasses import dataclass

import torch

from core.runtime.program.vectors import Kernel, number

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
    code = Kernel("gather")
    at = code.fields(FIELDS)
    with code.loop("%from", "%to") as row:
        index = code.integer(at["indices"], row.index)
        source = code.at(at["table"], index, spec.width * spec.dtype.itemsize)
        out = code.at(at["out"], row.index, spec.width * 4)
        for some in code.over(spec.width):
            value = code.read(source, *some.span, spec.dtype)
            if spec.scale != 1:
                value = code.op("fmul", value, number(spec.scale))
            code.write(value, out, *some.span, torch.float32)
    return code.address()
