"""Calls the kernels of the canonical product: rows of x by one matrix, from any slots that hold it."""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Sequence

import torch

from core.memory.codec.fast import plain, rows, states, tiles
from core.memory.codec.fast.layout import LANES, Blocks
from core.memory.codec.matrix import Matrix
from core.memory.codec.native.products import Runs
from core.memory.codec.native.threads import PART, acquire_team
from core.system.native.compile import address, compiled, widths
from core.system.native.ir import Code

TILED = 3  # rows of x from which on codes are unpacked for all of them
MOST_BYTES = 1 << 20  # of unpacked codes on a thread's stack
TOGETHER = 8  # rows of x that one thread prepares; of more, each takes some
HEADER = struct.Struct("3q")  # address of prepared rows of x, how many, address of results


def serves(matrix: Matrix) -> bool:
    """Whether this machine has kernels for a matrix."""
    return bool(widths()) and not matrix.transposed and not (matrix.bits and matrix.inputs % 32)


class CanonicalProducts:
    """Of one matrix. Thread-safe. A result depends on nothing but its row of x and the weights."""

    def __init__(self, matrix: Matrix, dtype: torch.dtype, out: torch.dtype | None = None) -> None:
        """`dtype`: of x; `out`: of results, x's where None."""
        self.matrix, self._dtype, self._out = matrix, dtype, out or dtype
        self._row_bytes = matrix.inputs * (matrix.bits or 8 * matrix.codes.dtype.itemsize) // 8
        self._unit = max(LANES * tiles.SIDES, PART // self._row_bytes & -LANES)

    def few(self, slots: Sequence[int], x: torch.Tensor, *, rounded: bool = True) -> torch.Tensor:
        """One row of x by the matrix of each slot: x [slots, in], or [1, in] shared -> [slots, out]; in fp32 where it
        is not to be rounded. `slots` are addresses."""
        out = x.new_empty(len(slots), self.matrix.outputs, dtype=self._out if rounded else torch.float32)
        self._run(slots, x, [1] * len(slots), out)
        return out

    def several(self, runs: Runs, x: torch.Tensor) -> torch.Tensor:
        """Consecutive rows of x by the matrix of each slot: of each run (rows, slots) so many of x [all, in] for every
        slot -> [all, out]."""
        out = x.new_empty(len(x), self.matrix.outputs, dtype=self._out)
        slots, counts = zip(*[(slot, count) for count, some in runs for slot in some], strict=True)
        self._run(slots, x, counts, out)
        return out

    def many(self, slot: int, x: torch.Tensor) -> torch.Tensor:
        """Rows x [..., in] by the matrix of one slot -> [..., out]."""
        out = x.new_empty(*x.shape[:-1], self.matrix.outputs, dtype=self._out)
        self._run([slot], x.reshape(-1, self.matrix.inputs), [x.numel() // self.matrix.inputs], out)
        return out

    def _run(self, slots: Sequence[int], x: torch.Tensor, counts: Sequence[int], out: torch.Tensor) -> None:
        """`counts[i]` consecutive rows of x, or the only one for all, by the matrix of slots[i], into consecutive rows
        of `out`."""
        assert x.dtype == self._dtype and x.shape[-1] == self.matrix.inputs
        kernels, x = _kernels(self.matrix, self._dtype, out.dtype), x.contiguous()
        given, shared, outputs = len(x), len(x) == 1, self.matrix.outputs
        x_row, out_row = self.matrix.inputs * x.itemsize, outputs * out.itemsize
        team = acquire_team()
        try:
            memory = team.memory(kernels, kernels.row_bytes * given)
            headers = team.memory(CanonicalProducts, HEADER.size * (len(slots) + 1))
            packed, done = bytearray(), 0
            for count in counts:
                at = 0 if shared else done
                packed += HEADER.pack(memory + at * kernels.row_bytes, count, out.data_ptr() + done * out_row)
                done += count
            packed += HEADER.pack(x.data_ptr(), 0, memory)
            ctypes.memmove(headers, bytes(packed), len(packed))
            rows_of_x = headers + HEADER.size * len(slots)
            if given <= TOGETHER:
                kernels.prepare(rows_of_x, 0, 0, 0, given)
            else:
                team.run([0], given, x_row, kernels.prepare_address, rows_of_x, 0, 0, 0, unit=TOGETHER)
            team.run(slots, outputs, self._row_bytes, kernels.multiply, headers, HEADER.size, 0, 0, unit=self._unit)
        finally:
            team.release()


class _Kernels:
    """The compiled functions of one matrix."""

    def __init__(self, matrix: Matrix, dtype: torch.dtype, out: torch.dtype) -> None:
        code = Code("void @multiply(ptr %header, ptr noalias %slot, ptr %nothing, i64 %from, i64 %to)")
        x, count, into = (code.load(kind, code.at("%header", 8 * i), 8) for i, kind in enumerate(("ptr", "i64", "ptr")))
        if not matrix.bits:
            self.row_bytes = plain.padded(matrix.inputs) * 4
            prepare = plain.prepare("prepare_one", matrix.inputs, dtype)
            plain.multiply(code, matrix, out, x, count, into)
        else:
            blocks = Blocks(matrix)
            self.row_bytes = blocks.bytes
            prepare = states.prepare("prepare_one", blocks, dtype)
            fits = matrix.inputs * tiles.SIDES * LANES <= MOST_BYTES
            if fits and tiles.serves(matrix, blocks):
                many = code.let(f"icmp sge i64 {count}, {TILED}")
                few, tiled = (
                    code.let(f"select i1 {many}, i64 0, i64 {count}"),
                    code.let(f"select i1 {many}, i64 {count}, i64 0"),
                )
                tiles.multiply(code, matrix, blocks, out, x, tiled, into)
                rows.multiply(code, matrix, blocks, out, x, few, into)
            else:
                rows.multiply(code, matrix, blocks, out, x, count, into)
        every = Code("void @prepare(ptr %header, ptr %slot, ptr %nothing, i64 %from, i64 %to)")
        given, to = (every.load("ptr", every.at("%header", at), 8) for at in (0, 16))
        with every.loop("%from", "%to") as each:
            source = every.at(given, each.index, matrix.inputs * dtype.itemsize)
            every.do(f"call void @prepare_one(ptr {source}, ptr {every.at(to, each.index, self.row_bytes)})")
        made = compiled(prepare, every, code, width=32)
        self.prepare = made["prepare"]
        self.prepare_address, self.multiply = address(self.prepare), address(made["multiply"])


_kernels = functools.lru_cache(maxsize=None)(_Kernels)
