"""Matrices of codes in plain numbers: for products that are torch's own, those of the reference arithmetic.

A weight is rounded to fp32 after it is scaled and again after its zero is added, as torch does, and then to its type.
"""

import functools
import threading

import torch

from core.memory.codec.fast import unpack
from core.memory.codec.fast.layout import LANES
from core.memory.codec.fast.steps import ALONE, Steps, Work
from core.memory.codec.matrix import Matrix
from core.memory.codec.native.threads import WORTH_IT, acquire_team
from core.system.native import numbers
from core.system.native.compile import address, compiled, supported
from core.system.native.ir import Code

KEPT = 16 << 20  # bytes: a matrix up to this size is written to memory that its thread keeps
TOGETHER = 16  # rows that a thread takes at a time


def serves(matrix: Matrix) -> bool:
    """Whether this machine has a kernel for a matrix of codes."""
    return supported() and matrix.bits > 0 and unpack.serves(matrix)


def dequantized(matrix: Matrix, slot: int, dtype: torch.dtype, *, fresh: bool = True) -> torch.Tensor:
    """The matrix in a slot, given by its address -> [out, in]. Without `fresh` it lies in memory of the calling thread,
    until its next one."""
    out = torch.empty(matrix.outputs, matrix.inputs, dtype=dtype) if fresh else _room(matrix, dtype)
    units = matrix.outputs
    small = units * matrix.inputs * matrix.bits // 8 < WORTH_IT
    with acquire_team() as team, _own.steps as steps:
        steps.add(Work(_kernel(matrix, dtype), (slot, out.data_ptr()), units, ALONE if small else TOGETHER))
        steps.run(team)
    return out


class _Own(threading.local):
    """Of one thread: its steps, and memory that one matrix after the other is written to. Fresh memory would cost the
    system's page faults at each of them."""

    def __init__(self) -> None:
        self.steps = Steps()
        self.memory = torch.empty(0, dtype=torch.uint8)


_own = _Own()


def _room(matrix: Matrix, dtype: torch.dtype) -> torch.Tensor:
    """Memory for a matrix [out, in], until the calling thread's next one."""
    size = matrix.outputs * matrix.inputs * dtype.itemsize
    if size > KEPT:
        return torch.empty(matrix.outputs, matrix.inputs, dtype=dtype)
    if _own.memory.numel() < size:
        with torch.inference_mode(False):
            _own.memory = torch.empty(size, dtype=torch.uint8)
    return _own.memory[:size].view(dtype).view(matrix.outputs, matrix.inputs)


@functools.cache
def _kernel(matrix: Matrix, dtype: torch.dtype) -> int:
    """The address of a kernel whose units are rows: (address of the slot, and of what is written)."""
    code = Code("void @dequantize(ptr %arguments, i64 %from, i64 %to)")
    slot, out = (code.load("ptr", code.at("%arguments", 8 * i), 8) for i in range(2))
    with code.loop("%from", "%to") as row, code.loop(0, matrix.inputs, unpack.SOME) as some:
        first = code.add(code.times(row.index, matrix.inputs), some.index)
        for i, eight in enumerate(unpack.unpacked(code, matrix, slot, row.index, some.index, fused=False)):
            numbers.store(code, eight, out, code.add(first, i * LANES), LANES, dtype)
    return address(compiled(code)["dequantize"])
