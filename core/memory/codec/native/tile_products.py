"""Products of many states with one matrix, each row of which is read once for all states, in bfloat16: see
`core.memory.codec.native.tiles`, for CPUs that multiply pairs of such numbers; on all others
`core.memory.codec.native.panels`, out of codes, and `core.memory.codec.native.dots`, out of plain numbers.

They take any number of states. torch's products of a prompt's experts take different numbers, and oneDNN generates a
kernel for each that it does not find among those that it keeps: a third of a millisecond, as long as the product of 20
states. Where oneDNN has none for such numbers, torch multiplies one state by one row at a time. Out of codes they need
no copy of the matrix; out of plain numbers they are used where their very bits are torch's.
"""

import ctypes
import functools
from typing import ClassVar, Protocol

import torch

from core.memory.codec.matrix import Matrix
from core.memory.codec.native import dots, panels, tiles
from core.memory.codec.native.dequantize import dequantize
from core.memory.codec.native.threads import acquire_team
from core.system.native.compile import PAIRS, address, compiled, multiplies_pairs, widths
from core.system.native.ir import Code

SPAN = 512  # inputs whose sums are added up: a panel of them stays in the cache
SPANS = (512, 1024, 256)  # oneDNN's, and of all inputs: which one depends on the matrix
MOST_BYTES = 1 << 20  # of a thread's rows, which are made out of codes on its stack
MANY = 128  # states up to which oneDNN's kernels have trials: every number of them one
SOME = (1, 2, 7)  # numbers of states in the trials of products that are torch's own, the same for any number
STEP = 32  # inputs have to be a multiple


def serves(matrix: Matrix, dtype: torch.dtype) -> bool:
    """Whether this machine has kernels for a matrix, of codes or of plain numbers."""
    if matrix.transposed or not widths():
        return False
    if multiplies_pairs():
        made, step, unit = 2, STEP, tiles.OUTPUTS
    elif matrix.bits:
        made, step, unit = 4, STEP, panels.OUTPUTS
    else:
        made, step, unit = 0, dots.SUMS, dots.OUTPUTS
    fits = not (matrix.outputs % unit or matrix.inputs % step)
    if not matrix.bits:
        return fits and dtype == matrix.codes.dtype == torch.bfloat16
    known = dtype == torch.bfloat16 or (dtype == torch.float16 and not multiplies_pairs())
    return fits and known and unit * matrix.inputs * made <= MOST_BYTES


class ManyProducts(Protocol):
    """Products of one matrix [out, in]. Thread-safe; results do not depend on the number of threads or of states."""

    def many(self, slot: int, x: torch.Tensor) -> torch.Tensor:
        """States x [..., in] times the matrix in a slot, given by its address -> [..., out]."""


def out_of_codes(matrix: Matrix, dtype: torch.dtype) -> ManyProducts:
    """Products of a matrix of codes that is served."""
    return TileProducts(matrix) if multiplies_pairs() else PanelProducts(matrix, dtype)


def by_onednn() -> bool:
    """Whether torch leaves products in bfloat16 to oneDNN."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


class TileProducts:
    """Of a matrix in bfloat16, or on CPUs that multiply pairs of such numbers of codes."""

    def __init__(self, matrix: Matrix, span: int = SPAN) -> None:
        """`span`: inputs that are summed before they are added to the others, where pairs are multiplied."""
        self._kernel = _tiles(matrix, min(span, matrix.inputs) if multiplies_pairs() else 0)
        self._outputs, self._inputs = matrix.outputs, matrix.inputs
        self._unit = tiles.OUTPUTS if multiplies_pairs() else dots.OUTPUTS

    def many(self, slot: int, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        out = x.new_empty(*x.shape[:-1], self._outputs)
        header = (ctypes.c_int64 * tiles.HEADER)(x.data_ptr(), x.numel() // self._inputs, out.data_ptr())
        with acquire_team() as team:
            at, row_bytes = ctypes.addressof(header), self._inputs * 2
            team.run([slot], self._outputs, row_bytes, self._kernel, at, 0, 0, 0, unit=self._unit)
        return out


class PanelProducts:
    """Of a matrix of codes, in fp32."""

    def __init__(self, matrix: Matrix, dtype: torch.dtype) -> None:
        """`dtype`: of states and results."""
        self._turn, self._kernel = _panels(matrix, dtype)
        self._outputs, self._inputs, self._width = matrix.outputs, matrix.inputs, widths()[0]

    def many(self, slot: int, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        count, out = x.numel() // self._inputs, x.new_empty(*x.shape[:-1], self._outputs)
        made = -(-count // (self._width // 4))
        with acquire_team() as team:
            memory = team.memory(PanelProducts, made * self._inputs * self._width)
            header = (ctypes.c_int64 * panels.HEADER)(x.data_ptr(), memory, count, out.data_ptr())
            at, row_bytes = ctypes.addressof(header), self._inputs * 4
            team.run([slot], made, row_bytes, self._turn, at, 0, 0, 0, unit=1)
            team.run([slot], self._outputs, row_bytes, self._kernel, at, 0, 0, 0, unit=panels.OUTPUTS)
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
def _tiles(matrix: Matrix, span: int) -> int:
    """The address of the kernel for this CPU, with the function that rows of codes are dequantised by."""
    width, stride = widths()[0], matrix.inputs * 2

    def plain(code: Code, first: str, last: str) -> str:
        return code.at(code.at("%slot", matrix.codes.at), first, stride)

    def made(code: Code, first: str, last: str) -> str:
        _dequantized(code, first, last, stride)
        return "%made"

    rows, size = (made, tiles.OUTPUTS * stride) if matrix.bits else (plain, 0)
    if multiplies_pairs():
        code = tiles.product("tiles", matrix.inputs, matrix.outputs, span, rows, size)
    else:
        code = dots.product("tiles", matrix.inputs, matrix.outputs, width, plain)
    more = [dequantize("dequantize", matrix, torch.bfloat16, width)] if matrix.bits else []
    return address(compiled(code, *more, width=width, features=PAIRS if multiplies_pairs() else "")["tiles"])


@functools.cache
def _panels(matrix: Matrix, dtype: torch.dtype) -> tuple[int, int]:
    """The addresses of the kernels that turn states into panels, and that multiply these."""
    width, inputs = widths()[0], matrix.inputs

    def rows(code: Code, first: str, last: str) -> None:
        _dequantized(code, first, last, inputs * 4)

    made = compiled(
        panels.turn("turn", inputs, width, dtype),
        panels.product("panels", inputs, matrix.outputs, width, dtype, rows),
        dequantize("dequantize", matrix, torch.float32, width),
        width=width,
    )
    return address(made["turn"]), address(made["panels"])


def _dequantized(code: Code, first: str, last: str, stride: int) -> None:
    """Append what dequantises rows first..last - 1 to %made, `stride` bytes each."""
    before = code.at("%made", code.let(f"mul i64 {first}, -{stride}"))
    code.do(f"call void @dequantize(ptr null, ptr %slot, ptr {before}, i64 {first}, i64 {last})")
