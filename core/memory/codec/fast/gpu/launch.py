"""Calls the kernels of one matrix: as `core.memory.codec.fast.products` on a CPU, with the same bits."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from core.memory.codec.kernels.products import BY_IDS, LANES_MOST, ByTriton, Launcher, Starter, launches
from core.memory.codec.matrix import Matrix

PREPARED_BLOCKS = 8  # of a program
OPTIONS = {"num_warps": 1, "enable_fp_fusion": False}  # each fma is written, none is made
MANY_REGISTERS = {"maxnreg": 168}  # of a thread: where some kernels would get 128 or 64, and spill
TILE = {"ROWS": 64, "TOGETHER": 32}  # rows of a matrix, and rows of x, that tensor cores multiply at once
TILE_OPTIONS = {**OPTIONS, "num_warps": 4}
TILE_REGISTERS = {"maxnreg": 255}  # as above, where some would get 168
SINCE = 8, 0  # compute capability from which Triton's compiler has tensor cores multiply integers


@functools.cache
def has_tiles(device: torch.device) -> bool:
    """Whether Triton compiles tiles of integers for a device: not for AMD's, for lack of a trial. No bit depends on
    it."""
    if device.type != "cuda":
        return True  # the interpreter, or nothing is launched
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= SINCE


def tile_options(form: Any) -> dict[str, Any]:
    """Of a tile's kernel: those of tables with blocks of 64 inputs may take all registers."""
    return TILE_OPTIONS | (TILE_REGISTERS if form.has_table and form.size == 64 else {})


class Groups(NamedTuple):
    """The rows of several experts, on the device: those of expert g are rows row[ends[g]] to row[ends[g + 1] - 1] of
    x, and its bytes are at bases[ids[g]]."""

    bases: torch.Tensor  # int64
    ids: torch.Tensor  # int64 [experts]
    ends: torch.Tensor  # int32 or int64 [experts + 1]
    row: torch.Tensor  # int64 [rows of all experts]


class GpuProducts:
    """The canonical product by one matrix. Everything runs on the current stream. A result depends on nothing but its
    row of x and the weights."""

    def __init__(self, matrix: Matrix, launcher: Launcher = ByTriton, *, join: Any = None, spec: Any = None) -> None:
        """`join`, `spec`: a function of Triton that makes one number of two rows of the matrix. Raises ImportError."""
        from core.memory.codec.fast.gpu.form import Ways, form
        from core.memory.codec.fast.gpu.prepare import prepare
        from core.memory.codec.fast.gpu.product import product
        from core.memory.codec.fast.gpu.tiles import tiled

        self.form = form(matrix)
        self.launcher, self._product = launcher, product
        self._starters: dict[tuple[int, int, bool], Starter] = {}
        self._prepare, self._prepare_tiled = (
            launcher(prepare, {"BLOCKS": PREPARED_BLOCKS, "TILED": tiled, "F": self.form, **OPTIONS})
            for tiled in (False, True)
        )
        self._join = {"JOIN": join, "SPEC": spec}
        self.outputs = matrix.outputs if join is None else matrix.outputs // 2
        self._ways, self._counters = Ways, torch.empty(0, dtype=torch.int32)
        self.programs = -(-matrix.outputs // (self.form.deep * self.form.across))
        self._tiled = launcher(tiled, {**TILE, "F": self.form, **self._join, **tile_options(self.form)})

    def prepare(self, x: torch.Tensor, tiled: bool = False) -> torch.Tensor:
        """Rows of x [n, in] as kernels take them: int32 [n, words], or x itself for plain weights."""
        x = x.contiguous()
        if not self.form.bits:
            return x
        into = torch.empty(len(x), self.form.prepared, dtype=torch.int32, device=x.device)
        prepare = self._prepare_tiled if tiled else self._prepare
        prepare[-(-self.form.blocks // PREPARED_BLOCKS), len(x)](x, into, x.stride(0))
        return into

    def few(self, slots: Sequence[torch.Tensor], x: torch.Tensor, out: torch.dtype = torch.float32) -> torch.Tensor:
        """A row of x [slots or 1, in] by the matrix of each slot (byte tensors) -> [slots, out]."""
        return self.at([slot.data_ptr() for slot in slots], x, out)

    def at(
        self,
        slots: Sequence[int],
        x: torch.Tensor,
        out: torch.dtype = torch.float32,
        *,
        given: torch.Tensor | None = None,
        then: "GpuProducts | None" = None,
    ) -> torch.Tensor:
        """The same for addresses of slots. `given`: x, prepared; `then`: results are prepared for its product, in the
        same launch."""
        given, stride = self._given(x, given)
        result, into = self._result(len(slots), x, out), self._into(len(slots), x, then)
        for first, count, bases in launches(slots):
            more = (None, None) if into is None else (into[first:], self._counters_of(count, x.device))
            states, start = given[first:] if stride else given, self._start(len(bases), 1, then)
            start[self.programs, count](states, result[first:], bases, None, None, None, stride, *more)
        return result if into is None else into

    def by_ids(
        self,
        bases: torch.Tensor,
        ids: torch.Tensor,
        x: torch.Tensor,
        out: torch.dtype = torch.float32,
        *,
        given: torch.Tensor | None = None,
        then: "GpuProducts | None" = None,
    ) -> torch.Tensor:
        """The same for experts that the device knows: ids [n] into a table of addresses, x [n or 1, in]."""
        given, stride = self._given(x, given)
        result, into = self._result(len(ids), x, out), self._into(len(ids), x, then)
        more = (None, None) if into is None else (into, self._counters_of(len(ids), x.device))
        start = self._start(BY_IDS, 1, then)
        start[self.programs, len(ids)](given, result, bases, ids, None, None, stride, *more)
        return result if into is None else into

    def several(
        self, groups: Groups, x: torch.Tensor, out: torch.dtype = torch.float32, *, tiled: bool = False
    ) -> torch.Tensor:
        """Rows of x [n, in] by the matrices of `groups` -> [rows of all groups, out]. `tiled`: by tensor cores where
        the weights are codes, which changes no bit."""
        tiled = tiled and self.form.bits > 0
        given, result = self.prepare(x, tiled), self._result(len(groups.row), x, out)
        start = self._tiled if tiled else self._start(BY_IDS, self.form.together)
        programs = -(-self.form.outputs // TILE["ROWS"]) if tiled else self.programs
        stride = given.stride(0) * given.itemsize
        told = given, result, groups.bases, groups.ids, groups.ends, groups.row, stride
        start[programs, len(groups.ids)](*told, *(() if tiled else (None, None)))
        return result

    def _result(self, rows: int, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(rows, self.outputs, dtype=dtype, device=x.device)

    def _given(self, x: torch.Tensor, given: torch.Tensor | None) -> tuple[torch.Tensor, int]:
        """Rows of x as kernels take them, and bytes from one to the next; 0 = there is one for all."""
        given = self.prepare(x) if given is None else given
        return given, given.stride(0) * given.itemsize if len(x) > 1 else 0

    def _into(self, rows: int, x: torch.Tensor, then: "GpuProducts | None") -> torch.Tensor | None:
        """What results are prepared into."""
        if then is None or not then.form.bits:
            return None
        return torch.empty(rows, then.form.prepared, dtype=torch.int32, device=x.device)

    def _counters_of(self, experts: int, device: torch.device) -> torch.Tensor:
        """Of the programs of each of a launch's experts that are through; 0 between launches."""
        if len(self._counters) < experts:
            with torch.inference_mode(False):
                self._counters = torch.zeros(max(experts, LANES_MOST), dtype=torch.int32, device=device)
        return self._counters

    def _start(self, lanes: int, together: int, then: "GpuProducts | None" = None) -> Starter:
        key = lanes, together, then is not None
        found = self._starters.get(key)
        if found is None:
            ways = None if then is None or not then.form.bits else self._ways((then.form,))
            constants = {"LANES": lanes, "TOGETHER": together, "BLOCKS": PREPARED_BLOCKS, "F": self.form}
            constants |= {"R": ways, **self._join, **OPTIONS}
            if together > 1:
                constants |= MANY_REGISTERS
            found = self._starters[key] = self.launcher(self._product, constants)
        return found
