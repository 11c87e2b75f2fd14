"""The fields of a call; vectors of eight fp32 lanes; the order of a sum."""

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


def kernel_code(name: str) -> Code:
    """An empty kernel."""
    return Code(f"void @{name}(ptr %arguments, i64 %from, i64 %to)")


def code_address(code: Code) -> int:
    """The address of a kernel, compiled for vectors of eight lanes."""
    return address(compiled(code, width=WIDTH)[code.name])


def fields(code: Code, names: Sequence[str], integers: Sequence[str] = ()) -> dict[str, str]:
    """The fields of a call by name: addresses, but for `integers`."""
    return {
        name: code.load("i64" if name in integers else "ptr", code.at("%arguments", 8 * i), 8)
        for i, name in enumerate(names)
    }


def load(code: Code, pointer: str, first: str | int, count: int, dtype: torch.dtype) -> str:
    """`count` numbers, at most eight, from index `first` on; the lanes after them are 0."""
    value = numbers.load(code, pointer, first, count, dtype)
    if count == LANES:
        return value
    places = [min(i, count) for i in range(LANES)]
    return code.pick(f"<{count} x float>", value, places, ZERO)


def filled(code: Code, value: str, count: int, other: str, kind: str = FLOATS) -> str:
    """The first `count` lanes, and those of `other` after them."""
    return value if count == LANES else code.pick(kind, value, [i + LANES * (i >= count) for i in range(LANES)], other)


def store(code: Code, value: str, pointer: str, first: str | int, count: int, dtype: torch.dtype) -> None:
    """Rounds the first `count` lanes to `dtype` and stores them at index `first`."""
    if count < LANES:
        value = code.pick(FLOATS, value, range(count))
    kind, short = numbers.rounded(code, value, count, dtype)
    code.store(kind, short, code.at(pointer, first, dtype.itemsize), dtype.itemsize)


def pieces(width: int) -> list[tuple[int, int]]:
    """(first, count) of each vector of `width` numbers."""
    return [(first, min(LANES, width - first)) for first in range(0, width, LANES)]


def over(
    code: Code, width: int, body: Callable[[str | int, int, list[str]], list[str]], begun: Sequence[str] = ()
) -> list[str]:
    """A loop over the vectors of `width` numbers: body(first, count, values) -> the next values, vectors of floats that
    start as `begun`. Returns the final ones."""
    values, whole = list(begun), width - width % LANES
    if whole:
        with code.loop(0, whole, LANES, [(FLOATS, value) for value in begun]) as each:
            each.next = body(each.index, LANES, each.values)
        values = each.values
    return body(whole, width - whole, values) if whole < width else values


@contextmanager
def where(code: Code, condition: str) -> Iterator[None]:
    """What is done only if a condition, an i1, holds."""
    with code.loop(0, code.let(f"zext i1 {condition} to i64")):
        yield


def fma(code: Code, one: str, other: str, added: str, lanes: int = LANES) -> str:
    """one * other + added, rounded once."""
    kind = f"<{lanes} x float>"
    return code.call(kind, f"llvm.fma.v{lanes}f32", (kind, one), (kind, other), (kind, added))


def total(code: Code, value: str) -> str:
    """The sum of eight lanes, a float: p[j] = lane j + lane j + 4, then (p0 + p2) + (p1 + p3)."""
    return _folded(code, value, lambda one, other, lanes: op(code, "fadd", one, other, lanes))


def largest(code: Code, value: str) -> str:
    """The largest of eight lanes, none of which is NaN: a float."""
    return _folded(code, value, lambda one, other, lanes: larger(code, one, other, lanes))


def _folded(code: Code, value: str, put: Callable[[str, str, int], str]) -> str:
    """Eight lanes put together by halves."""
    for half in (4, 2, 1):
        kind = f"<{2 * half} x float>"
        value = put(code.pick(kind, value, range(half)), code.pick(kind, value, range(half, 2 * half)), half)
    return code.let(f"extractelement <1 x float> {value}, i32 0")


def everywhere(code: Code, value: str) -> str:
    """A float in every lane."""
    return code.broadcast("float", value, LANES)


def number(value: float, lanes: int = LANES) -> str:
    """A constant, rounded to fp32, in every lane."""
    return splat("float", lanes, fp32(value))


def largest_of(code: Code, one: str, other: str) -> str:
    """The larger of two i64."""
    return code.call("i64", "llvm.smax.i64", ("i64", one), ("i64", other))


def least_of(code: Code, one: str, other: str) -> str:
    """The smaller of two i64."""
    return code.call("i64", "llvm.smin.i64", ("i64", one), ("i64", other))


def op(code: Code, name: str, one: str, other: str, lanes: int = LANES) -> str:
    """fadd, fsub, fmul or fdiv."""
    return code.let(f"{name} <{lanes} x float> {one}, {other}")


def larger(code: Code, one: str, other: str, lanes: int = LANES) -> str:
    """`one` where it is greater than `other`, else `other`: also where either is NaN."""
    kind = f"<{lanes} x float>"
    more = code.let(f"fcmp ogt {kind} {one}, {other}")
    return code.let(f"select <{lanes} x i1> {more}, {kind} {one}, {kind} {other}")
