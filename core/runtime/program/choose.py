"""The greatest of some numbers, one after the other, and groups of them that are left out."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from core.runtime.program.vectors import FLOATS, INTS, LANES, WIDTH, ZERO, Kernel, number, pieces
from core.system.native.ir import splat, vector

NAN, TAKEN = 0x7FFFFFFF, -0x80000000  # orders of NaN and of what is no longer there
LEAST = -0x7F800001  # of -inf


def room(code: Kernel, count: int) -> str:
    """The address of memory on the stack for `count` numbers of 4 bytes, up to a whole vector."""
    return code.stack(len(pieces(count)) * WIDTH)


def order(code: Kernel, value: str, count: int) -> str:
    """fp32 numbers as integers of the same order: -0 as 0, NaN as the greatest; TAKEN in the lanes from `count` on."""
    known = code.let(f"fcmp ord {FLOATS} {value}, {ZERO}")
    bits = code.let(f"bitcast {FLOATS} {code.op('fadd', value, number(0))} to {INTS}")
    sign, nan = code.let(f"ashr {INTS} {bits}, {splat('i32', LANES, 31)}"), splat("i32", LANES, NAN)
    flipped = code.let(f"xor {INTS} {bits}, {code.let(f'and {INTS} {sign}, {nan}')}")
    found = code.let(f"select <{LANES} x i1> {known}, {INTS} {flipped}, {INTS} {nan}")
    return code.filled(found, count, splat("i32", LANES, TAKEN), INTS)


def take_first(code: Kernel, orders: str, count: int) -> str:
    """The place, i64, of the first of the greatest of `count` orders, which is TAKEN then. One at least was not."""
    begun = [(INTS, splat("i32", LANES, TAKEN)), (INTS, ZERO)]
    with code.loop(0, len(pieces(count)) * LANES, LANES, begun) as each:  # of each lane
        found = code.load(INTS, code.at(orders, each.index, 4), WIDTH)
        start = code.broadcast("i32", code.let(f"trunc i64 {each.index} to i32"), LANES)
        more = code.let(f"icmp sgt {INTS} {found}, {each.values[0]}")
        each.next = [
            code.let(f"select <{LANES} x i1> {more}, {INTS} {new}, {INTS} {old}")
            for new, old in zip((found, start), each.values, strict=True)
        ]
    most, starts = each.values
    greatest = code.call("i32", f"llvm.vector.reduce.smax.v{LANES}i32", (INTS, most))
    equal = code.let(f"icmp eq {INTS} {most}, {code.broadcast('i32', greatest, LANES)}")
    places = code.let(f"add {INTS} {starts}, {vector('i32', range(LANES))}")
    places = code.let(f"select <{LANES} x i1> {equal}, {INTS} {places}, {INTS} {splat('i32', LANES, NAN)}")
    first = code.call("i32", f"llvm.vector.reduce.smin.v{LANES}i32", (INTS, places))
    place = code.let(f"zext i32 {first} to i64")
    code.store("i32", str(TAKEN), code.at(orders, place, 4), 4)
    return place


@dataclass(frozen=True)
class Groups:
    """`count` groups of `size` numbers that follow each other, of which `chosen` are kept: those with the greatest sums
    of their `best` (1 or 2) greatest numbers. Of equals the first is kept."""

    count: int
    size: int
    chosen: int
    best: int = 2

    def __post_init__(self) -> None:
        assert self.best in (1, 2) and 0 < self.chosen <= self.count and self.size >= self.best


@dataclass(frozen=True)
class GroupRoom:
    """Addresses of memory on the stack."""

    sums: str
    orders: str
    kept: str

    @staticmethod
    def on_stack(code: Kernel, groups: Groups) -> GroupRoom:
        return GroupRoom(*(room(code, count) for count in (groups.count, groups.count, groups.count)))


def keep_groups(code: Kernel, groups: Groups, made: GroupRoom, orders: str) -> None:
    """Give what is in the other groups the order of -inf."""
    with code.loop(0, groups.count) as group:
        begin, begun = code.at(orders, group.index, groups.size * 4), [("i32", str(TAKEN))] * 2
        with code.loop(0, groups.size, 1, begun) as each:
            new, (first, second) = code.load("i32", code.at(begin, each.index, 4), 4), each.values
            less = code.call("i32", "llvm.smin.i32", ("i32", new), ("i32", first))
            each.next = [
                code.call("i32", "llvm.smax.i32", ("i32", one), ("i32", other))
                for one, other in ((new, first), (less, second))
            ]
        best = [_number(code, value) for value in each.values[: groups.best]]
        score = code.let(f"fadd float {best[0]}, {best[1]}") if groups.best == 2 else best[0]
        code.store("float", score, code.at(made.sums, group.index, 4), 4)
        code.store("i32", "0", code.at(made.kept, group.index, 4), 4)
    for first_, count in pieces(groups.count):
        found = order(code, code.read(made.sums, first_, count, torch.float32), count)
        code.store(INTS, found, code.at(made.orders, first_, 4), WIDTH)
    with code.loop(0, groups.chosen):
        code.store("i32", "1", code.at(made.kept, take_first(code, made.orders, groups.count), 4), 4)
    with code.loop(0, groups.count) as group:
        kept = code.let(f"icmp ne i32 {code.load('i32', code.at(made.kept, group.index, 4), 4)}, 0")
        begin = code.at(orders, group.index, groups.size * 4)
        with code.loop(0, groups.size) as each:
            place = code.at(begin, each.index, 4)
            value = code.let(f"select i1 {kept}, i32 {code.load('i32', place, 4)}, i32 {LEAST}")
            code.store("i32", value, place, 4)


def _number(code: Kernel, of: str) -> str:
    """The number that has an order."""
    flip = code.let(f"and i32 {code.let(f'ashr i32 {of}, 31')}, {NAN}")
    return code.let(f"bitcast i32 {code.let(f'xor i32 {of}, {flip}')} to float")
