"""Calls the kernels: products with one matrix, from any slot that holds it."""

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from core.memory.codec.matrix import Matrix
from core.memory.codec.native import choice, codes
from core.memory.codec.native.dequantize import dequantize
from core.memory.codec.native.product import Product
from core.memory.codec.native.states import BLOCK, StateLayout, prepare
from core.memory.codec.native.threads import Team, acquire_team
from core.memory.codec.native.tile_products import ManyProducts, out_of_codes
from core.memory.codec.native.tile_products import serves as tiles_serve
from core.system.native.compile import address, compiled, widths

ROWS = 2  # rows of a matrix, and ...
STATES = 4  # ... states multiplied at once, ...
WIDE = 6  # ... and of those of a prompt, where they are as many: codes are then read fewer times
KEPT = 16 << 20  # bytes: a matrix up to this size is dequantised into memory that its thread keeps


def serves(matrix: Matrix, dtype: torch.dtype) -> bool:
    """Whether this machine has kernels for a quantised matrix."""
    fits = matrix.bits > 0 and matrix.inputs % BLOCK == 0 and matrix.outputs % ROWS == 0
    return fits and dtype in (torch.bfloat16, torch.float16) and bool(widths())


class RowKernels(Protocol):
    """Addresses of compiled functions: `prepare` makes `state_bytes` of a state, which `one` multiplies by rows of a
    matrix and rounds; `exact` does not round."""

    @property
    def state_bytes(self) -> int: ...
    @property
    def prepare(self) -> int: ...
    @property
    def one(self) -> int: ...
    def many(self, states: int, /) -> int: ...


Runs = Sequence[tuple[int, Sequence[int]]]
"""(states, addresses of slots): so many consecutive states go through each slot."""


def multiply(kernels: RowKernels, outputs: int, row_bytes: int, slots: Sequence[int], x: torch.Tensor) -> torch.Tensor:
    """One state times the matrix [outputs, in] of each slot: x [slots, in], or [1, in] shared -> [slots, outputs].
    `slots` are addresses; `row_bytes` = bytes of weights per output."""
    given, state_bytes = x.shape[0], kernels.state_bytes
    out = x.new_empty(len(slots), outputs)
    x = x.contiguous()
    with acquire_team() as team:
        team.run(
            slots,
            outputs,
            row_bytes,
            kernels.one,
            team.memory(kernels, state_bytes * given),
            state_bytes if given > 1 else 0,
            out.data_ptr(),
            outputs * out.itemsize,
            kernels.prepare,
            x.data_ptr(),
            x.shape[1] * x.itemsize,
            given,
            state_bytes,
        )
    return out


def several(kernels: RowKernels, outputs: int, row_bytes: int, runs: Runs, x: torch.Tensor) -> torch.Tensor:
    """Consecutive states times the matrix [outputs, in] of one slot: x [all, in] -> [all, outputs], rounded. Of each
    run (states, slots) the first `states` rows of x are multiplied by the matrix of the first slot, and so on. A row's
    result is the one that it has alone."""
    out, x, done = x.new_empty(len(x), outputs), x.contiguous(), 0
    with acquire_team() as team:
        states = team.memory(kernels, kernels.state_bytes * len(x))
        for count, slots in runs:
            _run(team, kernels, row_bytes, slots, count, done, x, out, states)
            done += count * len(slots)
    return out


def _run(
    team: Team,
    kernels: RowKernels,
    row_bytes: int,
    slots: Sequence[int],
    count: int,
    first: int,
    x: torch.Tensor,
    out: torch.Tensor,
    states: int,
) -> None:
    """Multiply `count` rows of x [..., in], from the `first` on, by the matrix of the first slot, and so on. Prepared
    ones lie at `states`."""
    outputs, state_bytes, x_row = out.shape[-1], kernels.state_bytes, x.shape[-1] * x.itemsize
    out_row = outputs * out.itemsize
    team.run(
        slots,
        outputs,
        row_bytes,
        kernels.many(count),
        states + first * state_bytes,
        count * state_bytes,
        out.data_ptr() + first * out_row,
        count * out_row,
        kernels.prepare,
        x.data_ptr() + first * x_row,
        x_row,
        count * len(slots),
        state_bytes,
    )


class Products:
    """Products of one matrix. Thread-safe; results do not depend on the number of threads."""

    def __init__(self, matrix: Matrix, dtype: torch.dtype, width: int = 0) -> None:
        """`width` = bytes of a vector; 0 = the widest that this CPU supports."""
        self.matrix, self._dtype = matrix, dtype
        self._kernels = _kernels(matrix, dtype, width or widths()[0])
        self._row_bytes = matrix.inputs * matrix.bits // 8

    def few(self, slots: Sequence[int], x: torch.Tensor) -> torch.Tensor:
        """Multiply one state by the matrix of each slot: x [slots, in], or [1, in] shared -> [slots, out]. `slots` are
        addresses. Sums are fp32, and rounded once."""
        assert x.dtype == self._dtype and x.shape[-1] == self.matrix.inputs
        return multiply(self._kernels, self.matrix.outputs, self._row_bytes, slots, x)

    def several(self, runs: Runs, x: torch.Tensor) -> torch.Tensor:
        """Multiply consecutive states by the matrix of one slot: see `several`."""
        return several(self._kernels, self.matrix.outputs, self._row_bytes, runs, x)

    def many(self, slot: int, x: torch.Tensor) -> torch.Tensor:
        """Multiply states by the matrix of one slot: x [..., in] -> [..., out]."""
        assert x.dtype == self._dtype and x.shape[-1] == self.matrix.inputs
        out = x.new_empty(*x.shape[:-1], self.matrix.outputs)
        x, count = x.contiguous(), x.numel() // self.matrix.inputs
        size = WIDE if count >= WIDE else STATES if count >= STATES else 1
        tiles, rest = divmod(count, size)
        with acquire_team() as team:
            states = team.memory(self._kernels, self._kernels.state_bytes * count)
            # the last states fill a tile together with some of those before, whose results are written once more
            for first, times in ((0, tiles), (count - size, 1 if rest else 0)):
                if times:
                    _run(team, self._kernels, self._row_bytes, [slot] * times, size, first, x, out, states)
        return out

    @functools.cached_property
    def ways(self) -> dict[str, Callable[[int, torch.Tensor], torch.Tensor]]:
        """All ways of multiplying any number of states, as `many` does, by name: see `choice`. All are as exact as
        torch's product of the dequantised matrix; their last bits differ."""
        found = {choice.CODES: self.many}
        if tiles_serve(self.matrix, self._dtype):
            found[choice.TILES] = lambda slot, x: self._tiles.many(slot, x)  # compiled when first used
        return {**found, choice.TORCH: self.unpacked}

    @functools.cached_property
    def _tiles(self) -> ManyProducts:
        return out_of_codes(self.matrix, self._dtype)

    def unpacked(self, slot: int, x: torch.Tensor) -> torch.Tensor:
        """As `many`, by torch's product of the dequantised matrix: x [..., in] -> [..., out]."""
        return torch.matmul(x, self._dequantized(slot, _room(self.matrix, self._dtype)).t())

    def dequantized(self, slot: int) -> torch.Tensor:
        """The dequantised matrix [out, in]."""
        return self._dequantized(slot, torch.empty(self.matrix.outputs, self.matrix.inputs, dtype=self._dtype))

    def _dequantized(self, slot: int, out: torch.Tensor) -> torch.Tensor:
        with acquire_team() as team:
            team.run([slot], self.matrix.outputs, self._row_bytes, self._kernels.dequantize, 0, 0, out.data_ptr(), 0)
        return out


class _Rooms(threading.local):
    """Of one thread: memory that one dequantised matrix after the other is written to. Fresh memory would cost the
    system's page faults at each of them."""

    memory = torch.empty(0, dtype=torch.uint8)


_rooms = _Rooms()


def _room(matrix: Matrix, dtype: torch.dtype) -> torch.Tensor:
    """Memory for a matrix [out, in], until the calling thread's next one."""
    size = matrix.outputs * matrix.inputs * dtype.itemsize
    if size > KEPT:
        return torch.empty(matrix.outputs, matrix.inputs, dtype=dtype)
    if _rooms.memory.numel() < size:
        with torch.inference_mode(False):
            _rooms.memory = torch.empty(size, dtype=torch.uint8)
    return _rooms.memory[:size].view(dtype).view(matrix.outputs, matrix.inputs)


class Kernels:
    """The compiled functions of one matrix."""

    def __init__(self, matrix: Matrix, dtype: torch.dtype, width: int) -> None:
        planes = codes.meaning(matrix).planes
        self.layout = StateLayout(matrix.inputs, matrix.group if matrix.zero is not None else 0, planes, width)
        few = max(plane.per_word for plane in planes) <= 4  # vectors at once: more need more registers than there are
        self._rows = ROWS if few else 1  # times STATES
        made = compiled(
            prepare("prepare", self.layout, dtype),
            Product("one", matrix, self.layout, dtype, ROWS, 1).code,
            width=width,
        )
        self.prepare, self.one = (address(made[name]) for name in ("prepare", "one"))
        self._matrix, self._width, self.state_bytes, self._dtype = matrix, width, self.layout.bytes, dtype
        self.many = functools.lru_cache(maxsize=None)(self._many)

    def _many(self, states: int) -> int:
        """The address of what multiplies so many states at once; compiled when first used."""
        if states == 1:
            return self.one
        rows = self._rows if states == STATES else ROWS
        made = compiled(Product("many", self._matrix, self.layout, self._dtype, rows, states).code, width=self._width)
        return address(made["many"])

    @functools.cached_property
    def dequantize(self) -> int:
        """What writes rows of the matrix in its number type; compiled when first used."""
        made = compiled(dequantize("dequantize", self._matrix, self._dtype, self._width), width=self._width)
        return address(made["dequantize"])


_kernels = functools.lru_cache(maxsize=None)(Kernels)
