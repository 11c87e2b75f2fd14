"""Products of many states with one matrix in bfloat16: see `core.memory.codec.native.tiles`.

torch's products of a prompt's experts take different numbers of states, and each number a kernel of its own, which
oneDNN generates anew where it does not find it among those that it keeps: a third of a millisecond, as long as the
product of 20 states. These take any number. Out of codes they need no copy of the matrix; out of plain numbers they are
used where their very bits are torch's.
"""

from __future__ import annotations

import ctypes
import functools
from typing import ClassVar

import torch

from core.memory.codec.matrix import Matrix
from core.memory.codec.native.dequantize import dequantize
from core.memory.codec.native.threads import TORCHS, claim, shared_by
from core.memory.codec.native.tiles import HEADER, OUTPUTS, product
from core.native import openmp
from core.native.compile import PAIRS, address, compiled, multiplies_pairs
from core.native.ir import Code

SPAN = 512  # inputs whose sums are added up: a panel of them stays in the cache
SPANS = (512, 1024, 256)  # oneDNN's, and of all inputs: which one depends on the matrix
MOST_BYTES = 1 << 20  # of OUTPUTS rows in bfloat16, which are made out of codes on a thread's stack
MANY = 128  # states up to which plain numbers have trials: every number of them one
STEP = 32  # inputs have to be a multiple


def serves(matrix: Matrix, dtype: torch.dtype) -> bool:
    """Whether this machine has kernels for a matrix, of codes or of bfloat16."""
    fits = not (matrix.transposed or matrix.outputs % OUTPUTS or matrix.inputs % STEP) and dtype == torch.bfloat16
    fits = fits and (matrix.codes.dtype == dtype if not matrix.bits else OUTPUTS * matrix.inputs * 2 <= MOST_BYTES)
    return fits and multiplies_pairs()


def shared() -> bool:
    """Whether torch's threads take part now: alone, a thread is slower than torch."""
    return shared_by() == TORCHS and (openmp.entry() != 0 or torch.get_num_threads() == 1)


class TileProducts:
    """Products of one matrix [out, in]. Thread-safe; results do not depend on the number of threads or of states."""

    def __init__(self, matrix: Matrix, span: int = SPAN) -> None:
        """`span`: inputs that are summed before they are added to the others."""
        self._kernel = _kernel(matrix, min(span, matrix.inputs))
        self._outputs, self._inputs = matrix.outputs, matrix.inputs

    def many(self, slot: int, x: torch.Tensor) -> torch.Tensor:
        """States x [..., in] times the matrix in a slot, given by its address -> [..., out]."""
        x = x.contiguous()
        out = x.new_empty(*x.shape[:-1], self._outputs)
        header = (ctypes.c_int64 * HEADER)(x.data_ptr(), x.numel() // self._inputs, out.data_ptr())
        team = claim()
        try:
            at, row_bytes = ctypes.addressof(header), self._inputs * 2
            team.run([slot], self._outputs, row_bytes, self._kernel, at, 0, 0, 0, unit=OUTPUTS)
        finally:
            team.release()
        return out


class ExactTiles:
    """Products of one matrix of bfloat16, for numbers of states at which they have the bits of torch's own. Which these
    are is tried once in a process for each kind of matrix; of more than MANY, trials would take longer than they
    save."""

    _found: ClassVar[dict[tuple[Matrix, int, int], TileProducts | None]] = {}  # by states, and by torch's threads

    def __init__(self, matrix: Matrix) -> None:
        self._matrix = matrix

    def many(self, slot: int, x: torch.Tensor) -> torch.Tensor | None:
        """States x [n, in] times the matrix in a slot -> [n, out]; None where the bits would not be torch's."""
        if len(x) > MANY:
            return None
        kind = self._matrix, len(x), torch.get_num_threads()
        if kind not in self._found:
            self._found[kind] = self._trial(len(x))
        products = self._found[kind]
        return None if products is None else products.many(slot, x)

    @torch.inference_mode()
    def _trial(self, states: int) -> TileProducts | None:
        """Compares sums that cancel out: all that is left of them is what was rounded, which every other order of
        additions would change nearly everywhere. Which kernel torch takes depends on sizes, not on values."""
        matrix = self._matrix
        weights = _cancelling(matrix.outputs, matrix.inputs, -1)
        x = _cancelling(MANY, matrix.inputs, 1)[:states]
        wanted = torch.mm(x, weights.t())
        for span in (*SPANS, matrix.inputs):
            if span <= matrix.inputs:
                products = TileProducts(matrix, span)
                if torch.equal(products.many(weights.data_ptr() - matrix.codes.at, x), wanted):
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
        made = compiled(product("tiles", matrix.inputs, matrix.outputs, span, plain), width=64, features=PAIRS)
        return address(made["tiles"])

    def out_of_codes(code: Code, first: str, last: str) -> str:
        before = code.at("%made", code.let(f"mul i64 {first}, -{stride}"))
        code.do(f"call void @dequantize(ptr null, ptr %slot, ptr {before}, i64 {first}, i64 {last})")
        return "%made"

    made = compiled(
        product("tiles", matrix.inputs, matrix.outputs, span, out_of_codes, made=OUTPUTS * stride),
        dequantize("dequantize", matrix, torch.bfloat16, 64),
        width=64,
        features=PAIRS,
    )
    return address(made["tiles"])
