"""A kernel under construction: the fields of its call, vectors of eight fp32 lanes, the order of a sum."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from core.system.native import numbers
from core.system.native.compile import address, compiled
from core.system.native.ir import Code, fp32, splat

LANES = 8
WIDTH = 4 * LANES  # bytes
FLOATS, INTS = f"<{LANES} x float>", f"<{LANES} x i32>"
ZERO = "zeroinitializer"


class Part:
    """What is taken at a time: `count` numbers from index `first` on, and the `values` that are carried, to be
    replaced by the next ones."""

    def __init__(self, count: int, values: list[str]) -> None:
        self.first: str | int = 0
        self.count, self.values = count, values

    @property
    def span(self) -> tuple[str | int, int]:
        return self.first, self.count

    @property
    def pieces(self) -> list[tuple[int, int]]:
        """(place after the first, count) of each vector."""
        return pieces(self.count)


class Kernel(Code):
    """A function of (the address of a call's fields, first unit, end)."""

    def __init__(self, name: str) -> None:
        super().__init__(f"void @{name}(ptr %arguments, i64 %from, i64 %to)")

    def address(self) -> int:
        """Where it is, compiled for vectors of eight lanes."""
        return address(compiled(self)[self.name])

    def fields(self, names: Sequence[str], integers: Sequence[str] = ()) -> dict[str, str]:
        """The fields of a call by name: addresses, but for `integers`."""
        return {
            name: self.load("i64" if name in integers else "ptr", self.at("%arguments", 8 * i), 8)
            for i, name in enumerate(names)
        }

    def read(self, pointer: str, first: str | int, count: int, dtype: torch.dtype) -> str:
        """`count` numbers, at most eight, from index `first` on; the lanes after them are 0."""
        return self.padded("float", numbers.load(self, pointer, first, count, dtype), count, LANES)

    def write(self, value: str, pointer: str, first: str | int, count: int, dtype: torch.dtype) -> None:
        """Rounds the first `count` lanes to `dtype` and stores them at index `first`."""
        if count < LANES:
            value = self.pick(FLOATS, value, range(count))
        numbers.store(self, value, pointer, first, count, dtype)

    def integer(self, table: str, index: str | int) -> str:
        """Number `index` of a table of i64."""
        return self.load("i64", self.at(table, index, 8), 8)

    def spread(self, table: str, index: str | int = 0) -> str:
        """Number `index` of a table of fp32, in every lane."""
        return self.everywhere(self.load("float", self.at(table, index, 4), 4))

    def everywhere(self, value: str) -> str:
        """A float in every lane."""
        return self.broadcast("float", value, LANES)

    def filled(self, value: str, count: int, other: str, kind: str = FLOATS) -> str:
        """The first `count` lanes, and those of `other` after them."""
        places = [i + LANES * (i >= count) for i in range(LANES)]
        return value if count == LANES else self.pick(kind, value, places, other)

    def over(self, width: int, begun: Sequence[str] = (), size: int = LANES) -> Iterator[Part]:
        """`width` numbers, `size` at a time in a loop, and then the rest, carrying vectors of floats that start as
        `begun`. The final values are available afterwards."""
        part, whole = Part(size, list(begun)), width - width % size
        if whole:
            with self.loop(0, whole, size, [(FLOATS, value) for value in begun]) as each:
                part.first, part.values = each.index, each.values
                yield part
                each.next = part.values
            part.values = each.values
        if whole < width:
            part.first, part.count = whole, width - whole
            yield part

    @contextmanager
    def where(self, condition: str) -> Iterator[None]:
        """What is done only if a condition, an i1, holds."""
        with self.loop(0, self.let(f"zext i1 {condition} to i64")):
            yield

    def op(self, name: str, one: str, other: str, lanes: int = LANES) -> str:
        """fadd, fsub, fmul or fdiv."""
        return self.let(f"{name} <{lanes} x float> {one}, {other}")

    def larger(self, one: str, other: str, lanes: int = LANES) -> str:
        """`one` where it is greater than `other`, else `other`: also where either is NaN."""
        kind = f"<{lanes} x float>"
        more = self.let(f"fcmp ogt {kind} {one}, {other}")
        return self.let(f"select <{lanes} x i1> {more}, {kind} {one}, {kind} {other}")

    def total(self, value: str) -> str:
        """The sum of eight lanes, a float: p[j] = lane j + lane j + 4, then (p0 + p2) + (p1 + p3)."""
        return self._folded(value, lambda one, other, lanes: self.op("fadd", one, other, lanes))

    def largest(self, value: str) -> str:
        """The largest of eight lanes, none of which is NaN: a float."""
        return self._folded(value, self.larger)

    def _folded(self, value: str, put: Callable[[str, str, int], str]) -> str:
        """Eight lanes put together by halves."""
        for half in (4, 2, 1):
            kind = f"<{2 * half} x float>"
            value = put(self.pick(kind, value, range(half)), self.pick(kind, value, range(half, 2 * half)), half)
        return self.first(value)


def pieces(width: int) -> list[tuple[int, int]]:
    """(first, count) of each vector of `width` numbers."""
    return [(first, min(LANES, width - first)) for first in range(0, width, LANES)]


def number(value: float, lanes: int = LANES) -> str:
    """A constant, rounded to fp32, in every lane."""
    return splat("float", lanes, fp32(value))
