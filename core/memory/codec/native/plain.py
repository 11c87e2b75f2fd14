"""Rows of plain numbers times a state, in fp32: what torch has no product for, where sums of bf16 are not rounded."""

import functools
from collections.abc import Iterator

import torch

from core.memory.codec.matrix import Matrix
from core.memory.codec.native.products import Runs, several
from core.system.native import numbers
from core.system.native.compile import address, compiled, widths
from core.system.native.ir import Code

STATES = 8  # most states multiplied at once; of a matrix always one row, whose numbers then come in the order of memory
NARROWEST = 4  # numbers of a vector: what inputs have to be a multiple of


def serves(matrix: Matrix) -> bool:
    """Whether this machine has kernels for a matrix of plain numbers."""
    fits = not (matrix.bits or matrix.transposed or matrix.inputs % NARROWEST)
    return fits and bool(widths())


class PlainProducts:
    """Products of one matrix of plain numbers [out, in]. Thread-safe; a row's sum depends on nothing but its numbers
    and the state's."""

    def __init__(self, matrix: Matrix, width: int = 0) -> None:
        """`width` = bytes of a vector; 0 = the widest that this CPU supports."""
        self.matrix = matrix
        self._kernels = _kernels(matrix, width or widths()[0])
        self._row_bytes = matrix.inputs * matrix.codes.dtype.itemsize

    def several(self, runs: Runs, x: torch.Tensor) -> torch.Tensor:
        """Multiply consecutive states by the matrix of one slot: see `products.several`."""
        return several(self._kernels, self.matrix.outputs, self._row_bytes, runs, x)


class PlainKernels:
    """The compiled functions of one matrix. A prepared state is its numbers as fp32."""

    def __init__(self, matrix: Matrix, width: int) -> None:
        stored = matrix.codes.dtype
        made = compiled(_prepare(matrix.inputs, stored, width // 4), _product("one", matrix, width // 4), width=width)
        self.prepare, self.one = (address(made[name]) for name in ("prepare", "one"))
        self._matrix, self._width, self.state_bytes = matrix, width, _state_bytes(matrix)
        self.many = functools.lru_cache(maxsize=None)(self._many)

    def _many(self, states: int) -> int:
        """The address of what multiplies so many states at once; compiled when first used."""
        if states == 1:
            return self.one
        width = self._width
        made = compiled(_product("many", self._matrix, width // 4, states), width=width)
        return address(made["many"])


_kernels = functools.lru_cache(maxsize=None)(PlainKernels)


def _state_bytes(matrix: Matrix) -> int:
    """Of a prepared state: whole cache lines."""
    return -(-matrix.inputs * 4 // 64) * 64


def _runs(inputs: int, lanes: int) -> Iterator[tuple[int, int, int]]:
    """(first input, vectors, lanes of each): all inputs, with narrower vectors at the end."""
    start = 0
    while start < inputs:
        if turns := (inputs - start) // lanes:
            yield start, turns, lanes
            start += turns * lanes
        lanes //= 2


def _prepare(inputs: int, stored: torch.dtype, lanes: int) -> Code:
    """Generates @prepare(x, into): a state as fp32."""
    code = Code("void @prepare(ptr noalias %x, ptr noalias %into)")
    for start, turns, count in _runs(inputs, lanes):
        with code.loop(0, turns) as each:
            at = code.add(code.times(each.index, count), start)
            code.store(f"<{count} x float>", numbers.load(code, "%x", at, count, stored), code.at("%into", at, 4), 4)
    return code


def _product(name: str, matrix: Matrix, lanes: int, states: int = 1) -> Code:
    """Generates the function name(states, slot, out, from, to): prepared states, consecutive in memory, times rows
    from..to - 1 of the matrix in a slot, into out [states, outputs], each rounded once. A sum does not depend on how
    many states there are."""
    code = Code(f"void @{name}(ptr noalias %states, ptr noalias %slot, ptr noalias %out, i64 %from, i64 %to)")
    stored, begin = matrix.codes.dtype, code.at("%slot", matrix.codes.at)
    given = [code.at("%states", t * _state_bytes(matrix)) for t in range(states)]
    with code.loop("%from", "%to") as each_row:
        row = code.at(begin, each_row.index, matrix.inputs * stored.itemsize)
        sums: list[list[str]] = [[] for _ in given]
        for start, turns, count in _runs(matrix.inputs, lanes):
            kind = f"<{count} x float>"
            with code.loop(0, turns, 1, [(kind, "zeroinitializer")] * states) as each:
                at = code.add(code.times(each.index, count), start)
                weights = numbers.load(code, row, at, count, stored)
                seen = [code.load(kind, code.at(state, at, 4), 4) for state in given]
                each.next = [
                    code.fma(weights, state, total, count) for state, total in zip(seen, each.values, strict=True)
                ]
            for found, total in zip(sums, each.values, strict=True):
                found.append(_sum(code, total, count))
        for t, found in enumerate(sums):
            y = functools.reduce(lambda one, other: code.let(f"fadd float {one}, {other}"), found)
            numbers.store_one(code, y, "%out", code.add(each_row.index, t * matrix.outputs), stored)
    return code


def _sum(code: Code, value: str, count: int) -> str:
    """The sum of all lanes."""
    kind = f"<{count} x float>"
    return code.call("float", f"llvm.vector.reduce.fadd.v{count}f32", ("float", "0.0"), (kind, value), flags="reassoc")
