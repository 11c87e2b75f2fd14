"""Products of many states with one matrix in bfloat16, with each row of it read once for all: see
`core.memory.codec.native.tiles`, for CPUs that multiply pairs of such numbers, and `core.memory.codec.native.dots`, for
all others.

They take any number of states. torch's products of a prompt's experts take different numbers, and oneDNN generates a
kernel for each that it does not find among those that it keeps: a third of a millisecond, as long as the product of 20
states. Where oneDNN has none for such numbers, torch multiplies one state by one row at a time. Out of codes tiles need
no copy of the matrix; out of plain numbers they are used where their very bits are torch's.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import ClassVar

import torch

from core.memory.codec.matrix import Matrix
from core.memory.codec.native import dots, tiles
from core.memory.codec.native.dequantize import dequantize
from core.memory.codec.native.threads import claim
from core.native.compile import PAIRS, address, compiled, multiplies_pairs, widths
from core.native.ir import Code

SPAN = 512  # inputs whose sums are added up: a panel of them stays in the cache
SPANS = (512, 1024, 256)  # oneDNN's, and of all inputs: which one depends on the matrix
MOST_BYTES = 1 << 20  # of a thread's rows in bfloat16, which are made out of codes on its stack
MANY = 128  # states up to which oneDNN's kernels have trials: every number of them one
SOME = (1, 2, 7)  # numbers of states in the trials of products that are torch's own, the same for any number
STEP = 32  # inputs have to be a multiple


def serves(matrix: Matrix, dtype: torch.dtype) -> bool:
    """Whether this machine has kernels for a matrix, of codes or of bfloat16."""
    if matrix.transposed or dtype != torch.bfloat16 or not widths():
        return False
    fits = not (matrix.outputs % _outputs() or matrix.inputs % (STEP if multiplies_pairs() else dots.SUMS))
    return fits and (matrix.codes.dtype == dtype if not matrix.bits else _outputs() * matrix.inputs * 2 <= MOST_BYTES)


def _outputs() -> int:
    """Rows that a thread takes at a time."""
    return tiles.OUTPUTS if multiplies_pairs() else dots.OUTPUTS


def by_onednn() -> bool:
    """Whether torch leaves products in bfloat16 to oneDNN."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


class TileProducts:
    """Products of one matrix [out, in]. Thread-safe; results do not depend on the number of threads or of states."""

    def __init__(self, matrix: Matrix, span: int = SPAN) -> None:
        """`span`: inputs that are summed before they are added to the others, where pairs are multiplied."""
        self._kernel = _kernel(matrix, min(span, matrix.inputs) if multiplies_pairs() else 0)
        self._outputs, self._inputs = matrix.outputs, matrix.inputs

    def many(self, slot: int, x: torch.Tensor) -> torch.Tensor:
        """States x [..., in] times the matrix in a slot, given by its address -> [..., out]."""
        x = x.contiguous()
        out = x.new_empty(*x.shape[:-1], self._outputs)
        header = (ctypes.c_int64 * tiles.HEADER)(x.data_ptr(), x.numel() // self._inputs, out.data_ptr())
        team = claim()
        try:
            at, row_bytes = ctypes.addressof(header), self._inputs * 2
            team.run([slot], self._outputs, row_bytes, self._kernel, at, 0, 0, 0, unit=_outputs())
        finally:
            team.release()
        return out


class ExactTiles:
    """Products of one matrix of bfloat16, for numbers of states at which they have the bits of torch's own. That is
    tried once in a process for each kind of matrix: for every number of states where oneDNN has a kernel for each (of
    more than MANY, trials would take longer than they save), else for all of them at once."""

    _found: ClassVar[dict[tuple[Matrix, int, int], TileProducts | None]] = {}  # by states, and by torch's threads

    def __init__(self, matrix: Matrix) -> None:
        self._matrix = matrix

    def many(self, slot: int, x: torch.Tensor) -> torch.Tensor | None:
        """States x [n, in] times the matrix in a slot -> [n, out]; None where the bits would not be torch's."""
        products = self.exact(x.numel() // self._matrix.inputs)
        return None if products is None else products.many(slot, x)

    def exact(self, states: int) -> TileProducts | None:
        """What multiplies so many states with torch's bits; None where nothing does."""
        each = by_onednn()
        if each and states > MANY:
            return None
        kind = self._matrix, states if each else 0, torch.get_num_threads()
        if kind not in self._found:
            self._found[kind] = self._trial((states,) if each else SOME)
        return self._found[kind]

    @torch.inference_mode()
    def _trial(self, numbers: tuple[int, ...]) -> TileProducts | None:
        """Compares sums that cancel out: all that is left of them is what was rounded, which every other order of
        additions would change nearly everywhere. Which kernel torch takes depends on sizes, not on values."""
        matrix = self._matrix
        weights = _cancelling(matrix.outputs, matrix.inputs, -1)
        at = weights.data_ptr() - matrix.codes.at
        given = [_cancelling(MANY, matrix.inputs, 1)[:states] for states in numbers]
        wanted = [torch.mm(x, weights.t()) for x in given]
        for span in (*SPANS, matrix.inputs) if multiplies_pairs() else (matrix.inputs,):
            if span <= matrix.inputs:
                products = TileProducts(matrix, span)
                if all(torch.equal(products.many(at, x), y) for x, y in zip(given, wanted, strict=True)):
                    return products
        return None


@functools.lru_cache(maxsize=8)  # a first prompt has trials of many numbers of states
def _cancelling(rows: int, inputs: int, sign: int) -> torch.Tensor:
    """Random [rows, inputs] whose second half is the first, in the other direction and with this sign."""
    half = torch.randn(rows, inputs // 2, generator=torch.Generator().manual_seed(rows)).bfloat16()
    return torch.cat([half, half.flip(1) * sign], 1)


@functools.cache
def _kernel(matrix: Matrix, span: int) -> int:
    stride = matrix.inputs * 2

    def plain(code: Code, first: str, last: str) -> str:
        return code.at(code.at("%slot", matrix.codes.at), first, stride)

    if not matrix.bits:
        return _compiled(matrix, span, plain, made=0)

    def out_of_codes(code: Code, first: str, last: str) -> str:
        before = code.at("%made", code.let(f"mul i64 {first}, -{stride}"))
        code.do(f"call void @dequantize(ptr null, ptr %slot, ptr {before}, i64 {first}, i64 {last})")
        return "%made"

    return _compiled(matrix, span, out_of_codes, made=_outputs() * stride)


def _compiled(matrix: Matrix, span: int, rows: Callable[[Code, str, str], str], made: int) -> int:
    """The address of the kernel for this CPU, with the function that rows of codes are dequantised by."""
    width, features = widths()[0], PAIRS if multiplies_pairs() else ""
    if multiplies_pairs():
        code = tiles.product("tiles", matrix.inputs, matrix.outputs, span, rows, made)
    else:
        code = dots.product("tiles", matrix.inputs, matrix.outputs, width, rows, made)
    more = [dequantize("dequantize", matrix, torch.bfloat16, width)] if matrix.bits else []
    return address(compiled(code, *more, width=width, features=features)["tiles"])
