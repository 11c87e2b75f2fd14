"""The canonical product of rows of x by one matrix, from any slots that hold it, as steps of a run."""

import functools
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from core.memory.codec.fast import plain, rows, states, tiles
from core.memory.codec.fast.choice import ROWS as TIMED_ROWS
from core.memory.codec.fast.choice import Timed, choose, timed
from core.memory.codec.fast.layout import LANES, Blocks, block_of
from core.memory.codec.fast.steps import Steps, Work
from core.memory.codec.matrix import Matrix
from core.memory.codec.native.threads import PART, WORTH_IT, acquire_team, shared_by
from core.system.native.compile import address, compiled, supported
from core.system.native.ir import Code

TILED = 3  # rows of x from which on codes are unpacked for all of them, until that was timed
MOST_BYTES = 1 << 20  # of unpacked codes on a thread's stack
TILE = LANES * tiles.SIDES  # rows of the matrix
LONG = 256 << 10  # bytes of the matrix that a thread takes at a time, at most
SEVERAL = 4  # times that a thread takes some
TOGETHER = 8  # rows of x that a thread prepares at a time
GIVEN = 5  # numbers for each slot: those of `rows.Given`
INDEX, COUNT, INTO = 1, 2, 3  # some of these
ROWS, TILES = "rows", "tiles"  # the ways: one row of x at a time, or several
LONGEST = TIMED_ROWS[-1]
NUMBERED = 1 << 16  # rows of x that are multiplied at once, at most

Runs = Sequence[tuple[int, Sequence[int]]]
"""(rows, addresses of slots): so many consecutive rows of x go through each slot."""


def serves(matrix: Matrix) -> bool:
    """Whether this machine has kernels for a matrix, each of whose slots must have whole blocks."""
    partial = matrix.bits and matrix.inputs % 32 or matrix.blocks > 1 and matrix.own % _size(matrix)
    return supported() and not partial


class CanonicalProducts:
    """Of one matrix. Thread-safe. A result depends on nothing but its row of x and the weights."""

    def __init__(self, matrix: Matrix, dtype: torch.dtype, out: torch.dtype | None = None, *, tiled: int = 0) -> None:
        """`dtype`: of x; `out`: of results, x's where None. `tiled`: as the property; 0 = as timed."""
        self.matrix, self._dtype, self._out = matrix, dtype, out or dtype
        self._row_bytes = matrix.inputs * (matrix.bits or 8 * matrix.codes.dtype.itemsize) // 8
        self._fixed, self._tiled = tiled > 0, tiled or TILED
        self._timed: Timed | None = None

    @functools.cached_property
    def prepared_bytes(self) -> int:
        """Of a prepared row of x."""
        return _prepared_bytes(self.matrix)

    def prepare(self, x: int, x_row: int, count: int, into: int) -> Work:
        """Prepare `count` rows at address `x`, `x_row` bytes apart, into `prepared_bytes` each."""
        return Work(_prepare(_inputs_of(self.matrix), self._dtype), (x, x_row, into), count, TOGETHER)

    def multiply(self, steps: Steps, given: Sequence[int], slots: Sequence[int], out: torch.dtype) -> Work:
        """Multiply prepared rows by the matrix of each slot, or of several: GIVEN numbers for each."""
        return self.multiply_at(given[COUNT::GIVEN], steps.put(given), steps.put(slots), out)

    def multiply_at(self, counts: Sequence[int], given: int, slots: int, out: torch.dtype) -> Work:
        """The same with the addresses of these numbers and of the slots' addresses, which follow one another where a
        matrix is in several. `counts`: rows of x for each matrix, which may be others when it runs."""
        size = self.matrix.outputs * self._row_bytes
        rows = self._at_once(size * sum(counts) // max(counts))
        parts = -(-self.matrix.outputs // rows)
        units = len(counts) * parts
        some = units if len(counts) * size < WORTH_IT else 1  # others would join too late
        arguments = given, slots, parts, rows, self.tiled, self.matrix.outputs
        return Work(_multiply(_kernel_of(self.matrix), out), arguments, units, some)

    def _at_once(self, size: int) -> int:
        """Rows of the matrix that a thread takes at a time, of `size` bytes in all: long ranges are read faster, but
        each thread is to take several."""
        part = max(PART, min(LONG, size // (SEVERAL * max(shared_by(), 1))))
        whole = plain.COLUMNS if self.matrix.transposed else TILE
        return max(1, part // self._row_bytes // whole) * whole

    # ------------------------------------------------------------------ a choice that changes no bit

    @property
    def kind(self) -> str:
        """What products that take the same time have in common."""
        one = self.matrix
        zero = " with zeros" if one.zero is not None else ""
        wide = f" of {one.wide}" if one.wide else ""
        return f"fast, {one.bits} bits {one.table} {one.group}{wide}{zero}, {one.outputs} x {one.inputs}"

    @property
    def tiled(self) -> int:
        """Rows of x from which on codes are unpacked for all of them."""
        found = None if self._fixed else timed(self.kind)
        if found is not self._timed:
            self._timed = found
            self._tiled = TILED if found is None else _threshold(found)
        return self._tiled

    def choose(self, threads: int) -> None:
        """Time both ways on this machine, unless that is known."""
        if self.matrix.bits and self._row_bytes * self.matrix.outputs >= WORTH_IT:
            whole = self.matrix._replace(blocks=1)
            slot, x = torch.zeros(_slot_bytes(whole), dtype=torch.uint8), torch.ones(LONGEST, whole.inputs)
            ways = {
                ROWS: CanonicalProducts(whole, torch.float32, tiled=LONGEST + 1),
                TILES: CanonicalProducts(whole, torch.float32, tiled=1),
            }
            times = {name: lambda rows, way=way: way.many(slot.data_ptr(), x[:rows]) for name, way in ways.items()}
            choose(self.kind, times, threads)

    # ------------------------------------------------------------------ products of tensors

    def few(self, slots: Sequence[int], x: torch.Tensor) -> torch.Tensor:
        """One row of x by the matrix of each slot: x [slots, in], or [1, in] shared -> [slots, out]; in fp32 where it
        is not to be rounded. `slots` are addresses."""
        return self.run(slots, x, [1] * len(slots), self._out)

    def several(self, runs: Runs, x: torch.Tensor) -> torch.Tensor:
        """Consecutive rows of x by the matrix of each slot: of each run (rows, slots) so many of x [all, in] for every
        slot -> [all, out]."""
        slots, counts = zip(*[(slot, count) for count, some in runs for slot in some], strict=True)
        return self.run(slots, x, counts, self._out)

    def many(self, slot: int, x: torch.Tensor) -> torch.Tensor:
        """Rows x [..., in] by the matrix of one slot -> [..., out]."""
        given = x.reshape(-1, self.matrix.inputs)
        return self.run([slot], given, [len(given)], self._out).view(*x.shape[:-1], -1)

    def run(self, slots: Sequence[int], x: torch.Tensor, counts: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """`counts[i]` consecutive rows of x, or the only one for all, by the matrix of slots[i] -> [all, out]."""
        assert x.dtype == self._dtype and x.shape[-1] == self.matrix.inputs
        x, out = x.contiguous(), x.new_empty(sum(counts), self.matrix.outputs, dtype=dtype)
        steps = _own.steps
        with acquire_team() as team, steps:
            memory = team.memory(self.matrix, self.prepared_bytes * len(x))
            given = [*self.given(memory, counts, out.data_ptr(), out.stride(0) * out.itemsize, shared=len(x) == 1)]
            steps.add(self.prepare(x.data_ptr(), x.shape[1] * x.itemsize, len(x), memory))
            steps.add(self.multiply(steps, given, slots, dtype))
            steps.run(team)
        return out

    def given(
        self, prepared: int, counts: Sequence[int], out: int, out_row: int, *, shared: bool = False
    ) -> Iterator[int]:
        """GIVEN numbers for each of `counts`: consecutive prepared rows, or the first one, and consecutive results."""
        done = 0
        for count in counts:
            yield from (prepared, numbered(0 if shared else done), count, out + done * out_row, out_row)
            done += count


@functools.cache
def _numbers() -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.arange(NUMBERED)


def numbered(first: int) -> int:
    """The address of the numbers of consecutive rows from the `first` on."""
    return _numbers().data_ptr() + 8 * first


def _size(matrix: Matrix) -> int:
    """Inputs of a block."""
    return block_of(matrix) if matrix.bits else LANES


def _slot_bytes(matrix: Matrix) -> int:
    """Bytes that a slot with this matrix has at most."""
    parts = [part for part in (matrix.codes, matrix.high, matrix.scale, matrix.zero) if part is not None]
    return max(part.at for part in parts) + matrix.outputs * matrix.inputs * 4


def _threshold(timed: Timed) -> int:
    """Rows of x from which on tiles are the fastest way."""
    return next((rows for rows in range(2, LONGEST) if timed.fastest(rows) == TILES), LONGEST)


class _Own(threading.local):
    def __init__(self) -> None:
        self.steps = Steps()


_own = _Own()


def _prepared_bytes(matrix: Matrix) -> int:
    return Blocks(matrix).bytes if matrix.bits else plain.padded(matrix.inputs) * 4


def _inputs_of(matrix: Matrix) -> Matrix:
    """What the kernel that prepares a row of x depends on."""
    codes, high = matrix.codes._replace(at=0), matrix.high and matrix.high._replace(at=0)
    return matrix._replace(outputs=0, codes=codes, high=high, scale=None, zero=None, bias=None, row=None, blocks=1)


def _kernel_of(matrix: Matrix) -> Matrix:
    """What the kernel that multiplies depends on: the number of rows of plain numbers only where these are turned, and
    of that of codes whether they are whole vectors."""
    outputs = matrix.outputs if matrix.transposed else int(bool(matrix.bits and matrix.outputs % LANES))
    return matrix._replace(outputs=outputs, bias=None)


@functools.cache
def _prepare(matrix: Matrix, dtype: torch.dtype) -> int:
    """The address of a kernel whose units are rows of x: (address of x, bytes between rows, where they go)."""
    name, size = "prepare_one", _prepared_bytes(matrix)
    if matrix.bits:
        one = states.prepare(name, Blocks(matrix), dtype)
    else:
        one = plain.prepare(name, matrix.inputs, dtype)
    code = Code("void @prepare(ptr %arguments, i64 %from, i64 %to)")
    x, row, into = (code.load(kind, code.at("%arguments", 8 * i), 8) for i, kind in enumerate(("ptr", "i64", "ptr")))
    with code.loop("%from", "%to") as each:
        source = code.at(x, code.let(f"mul i64 {each.index}, {row}"))
        code.do(f"call void @{name}(ptr {source}, ptr {code.at(into, each.index, size)})")
    return address(compiled(one, code)["prepare"])


@functools.cache
def _multiply(matrix: Matrix, out: torch.dtype) -> int:
    """The address of a kernel whose units are some rows of the matrix of a slot: (GIVEN numbers for each slot, the
    slots' addresses, units of a slot, rows of a unit, rows of x from which on codes are unpacked, rows of a
    matrix)."""
    code = Code("void @some(ptr %given, ptr noalias %slot, i64 %from, i64 %to, i64 %tiled)")
    kinds = "ptr", "ptr", "i64", "ptr", "i64"
    given = rows.Given(*[code.load(kind, code.at("%given", 8 * i), 8) for i, kind in enumerate(kinds)])
    unpacking = list[Code]()
    if not matrix.bits:
        plain.multiply(code, matrix, out, given)
    else:
        blocks = Blocks(matrix)
        if matrix.inputs * TILE <= MOST_BYTES and tiles.serves(matrix, blocks):
            unpacking.append(tiles.unpack("unpack", matrix, blocks))
            many = code.let(f"icmp sge i64 {given.count}, %tiled")
            few, tiled = (
                code.let(f"select i1 {many}, {which}")
                for which in (f"i64 0, i64 {given.count}", f"i64 {given.count}, i64 0")
            )
            tiles.multiply(code, "unpack", matrix, blocks, out, replace(given, count=tiled))
            rows.multiply(code, matrix, blocks, out, replace(given, count=few))
        else:
            rows.multiply(code, matrix, blocks, out, given)
    every = Code("void @multiply(ptr %arguments, i64 %from, i64 %to)")
    headers, slots, parts, some, tiled, outputs = (
        every.load("i64" if i > 1 else "ptr", every.at("%arguments", 8 * i), 8) for i in range(6)
    )
    with every.loop("%from", "%to") as unit:
        one, part = (every.let(f"{name} i64 {unit.index}, {parts}") for name in ("udiv", "urem"))
        first = every.let(f"mul i64 {part}, {some}")
        last = every.least(every.add(first, some), outputs)
        slot = every.at(slots, one, 8 * matrix.blocks)  # where the addresses of its slots are
        if matrix.blocks == 1:
            slot = every.load("ptr", slot, 8)
        header = every.at(headers, one, 8 * GIVEN)
        with every.loop(0, every.least(every.load("i64", every.at(header, 8 * COUNT), 8), 1)):  # of no row, nothing
            every.do(f"call void @some(ptr {header}, ptr {slot}, i64 {first}, i64 {last}, i64 {tiled})")
    return address(compiled(*unpacking, code, every)["multiply"])
