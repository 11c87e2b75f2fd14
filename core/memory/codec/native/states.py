"""States as whole numbers: what codes are multiplied by, and how that lies in memory.

32 numbers of a state share a power of two, chosen so that the largest of them takes 15 bits and a sign. A number of
bfloat16 within 1/64 of the largest is then kept exactly, any other to 2^-15 of it: far closer than bfloat16 itself
keeps what comes out.

Codes of `bits` bits are read as words of 16; code s of all words of a vector is one vector. So states are stored in
that order: for every vector of codes, its words' first numbers, then their second ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from core.native import numbers
from core.native.ir import Code, splat

BLOCK = 32  # numbers that share a power of two
TOP = 14  # its exponent below that of the largest number
SMALLEST = 16  # bytes: the narrowest vector that is multiplied
LINE = 64  # bytes: what parts of a state are aligned to


class Plane(NamedTuple):
    """Codes of `bits` bits, lowest first, each counting `weight` times what it is above `offset`."""

    bits: int
    offset: int
    weight: int
    at: int  # bytes from a slot's start

    @property
    def per_word(self) -> int:
        return 16 // self.bits


class Piece(NamedTuple):
    """A run of one plane's codes that is multiplied as one vector, `turns` times over."""

    start: int  # first input
    turns: int
    codes: int  # inputs of each
    bytes: int  # of codes in each: what is read
    words: int  # 16-bit numbers of the vector: more than are read where that is too narrow

    @property
    def lanes(self) -> int:
        """Sums of 32 bits: each takes in two words."""
        return self.words // 2


def pieces(inputs: int, plane: Plane, width: int) -> Iterator[Piece]:
    """Cut a row of `inputs`, a multiple of 32, into vectors of `width` bytes of codes and narrower ones at its end."""
    start = 0
    while start < inputs:
        codes = width * 8 // plane.bits
        if turns := (inputs - start) // codes:
            yield Piece(start, turns, codes, width, max(width, SMALLEST) // 2)
            start += turns * codes
        width //= 2


class Place(NamedTuple):
    """Where a piece's numbers lie in a state, in bytes from its start."""

    numbers: int  # i16, in the order of the codes
    steps: int  # fp32 a lane: what its sum is to be multiplied by
    offsets: int  # i32 a lane: its sum to begin with


class Room:
    """How one state [inputs] lies in memory. `group` = numbers whose sum is wanted, too; 0 = none."""

    def __init__(self, inputs: int, group: int, planes: tuple[Plane, ...], width: int) -> None:
        self.inputs, self.group, self.planes, self.width = inputs, group, planes, width
        self.bytes = 0
        self.places = {
            (p, piece): Place(
                self._take(piece.turns * piece.words * plane.per_word * 2),
                self._take(piece.turns * piece.lanes * 4),
                self._take(piece.turns * piece.lanes * 4),
            )
            for p, plane in enumerate(planes)
            for piece in pieces(inputs, plane, width)
        }
        self.sums = self._take(inputs // group * 4 if group else 0)  # fp32 a group

    def _take(self, size: int) -> int:
        start = self.bytes
        self.bytes += -(-size // LINE) * LINE
        return start


def prepare(name: str, room: Room, dtype: torch.dtype) -> Code:
    """The function name(x, into): one state of a number type into its room, which is zeros beforehand."""
    code = Code(f"void @{name}(ptr noalias %x, ptr noalias %into)")
    if room.group:
        with code.loop(0, room.inputs // room.group) as each:
            code.store("float", "0.0", code.at(code.at("%into", room.sums), each.index, 4))
    for (p, piece), place in room.places.items():
        plane = room.planes[p]
        with code.loop(0, piece.turns) as each, code.loop(0, piece.codes // BLOCK) as block:
            first = code.add(code.times(each.index, piece.codes), piece.start)
            at = code.add(first, code.times(block.index, BLOCK))
            sizes = piece.words * plane.per_word * 2, piece.lanes * 4, piece.lanes * 4
            into = [
                code.at(code.at(code.at("%into", start), each.index, size), block.index, 4 * plane.bits)
                for start, size in zip(place, sizes, strict=True)
            ]
            whole, step = _whole(code, numbers.load(code, "%x", at, BLOCK, dtype))
            _scatter(code, whole, step, plane, piece, into)
            if room.group and p == 0:
                group = code.let(f"udiv i64 {at}, {room.group}")
                _count(code, whole, step, code.at(code.at("%into", room.sums), group, 4))
    return code


INTS = f"<{BLOCK} x i32>"


def _whole(code: Code, x: str) -> tuple[str, str]:
    """32 fp32 as whole numbers (i32) of at most 15 bits and a sign, and the float that each counts."""
    floats = f"<{BLOCK} x float>"
    bits = code.let(f"bitcast {floats} {x} to {INTS}")
    bits = code.let(f"and {INTS} {bits}, {splat('i32', BLOCK, 0x7FFFFFFF)}")
    largest = code.call("i32", f"llvm.vector.reduce.umax.v{BLOCK}i32", (INTS, bits))
    exponent = code.let(f"lshr i32 {largest}, 23")
    exponent = code.call("i32", "llvm.umax.i32", ("i32", exponent), ("i32", str(TOP + 1)))
    finite = code.let(f"icmp ult i32 {exponent}, 255")
    step = code.let(f"sub i32 {exponent}, {TOP}")
    step = code.let(f"shl i32 {step}, 23")
    step = code.let(f"select i1 {finite}, i32 {step}, i32 {0x7FC00000}")  # else nothing that comes out is a number
    step = code.let(f"bitcast i32 {step} to float")
    inverse = code.let(f"sub i32 {254 + TOP}, {exponent}")
    inverse = code.let(f"shl i32 {inverse}, 23")
    inverse = code.broadcast("float", code.let(f"bitcast i32 {inverse} to float"), BLOCK)
    scaled = code.let(f"fmul {floats} {x}, {inverse}")
    scaled = code.let(f"select i1 {finite}, {floats} {scaled}, {floats} zeroinitializer")
    near = code.call(floats, f"llvm.rint.v{BLOCK}f32", (floats, scaled))  # below 2 ** 15: 11 bits at most were given
    return code.let(f"fptosi {floats} {near} to {INTS}"), step


def _scatter(code: Code, whole: str, step: str, plane: Plane, piece: Piece, into: Sequence[str]) -> None:
    """32 whole numbers to where the codes that they belong to will be; `into` as in Place."""
    places, steps, offsets = into
    words = 2 * plane.bits  # that their codes are in
    short = code.let(f"trunc {INTS} {whole} to <{BLOCK} x i16>")
    for s in range(plane.per_word):
        part = code.pick(f"<{BLOCK} x i16>", short, range(s, BLOCK, plane.per_word))
        code.store(f"<{words} x i16>", part, code.at(places, s * piece.words * 2), 2)
    code.store(f"<{plane.bits} x float>", code.broadcast("float", step, plane.bits), steps, 4)
    if plane.offset:
        sums, ints = _halved(code, whole, plane.bits), f"<{plane.bits} x i32>"
        sums = code.let(f"mul {ints} {sums}, {splat('i32', plane.bits, -plane.offset)}")
        code.store(ints, sums, offsets, 4)


def _count(code: Code, whole: str, step: str, place: str) -> None:
    """Add what 32 whole numbers stand for to the float at `place`."""
    total = code.let(f"extractelement <1 x i32> {_halved(code, whole, 1)}, i32 0")
    value = code.let(f"sitofp i32 {total} to float")
    value = code.let(f"fmul float {value}, {step}")
    before = code.load("float", place, 4)
    code.store("float", code.let(f"fadd float {before}, {value}"), place, 4)


def _halved(code: Code, value: str, until: int) -> str:
    """Sums of neighbours: 32 whole numbers become `until`."""
    count = BLOCK
    while count > until:
        even, odd = (code.pick(f"<{count} x i32>", value, range(odd, count, 2)) for odd in (0, 1))
        count //= 2
        value = code.let(f"add <{count} x i32> {even}, {odd}")
    return value
