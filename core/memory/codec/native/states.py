"""States as integers: the operand that codes are multiplied by, and its memory layout.

32 numbers of a state share a power of two, chosen so that the largest of them takes 15 bits and a sign. A bfloat16
number within 1/64 of the largest is then exact, any other is kept to 2^-15 of the largest: far more accurate than
bfloat16 results.

Codes of `bits` bits are read as 16-bit words; code s of all words of a vector forms one vector. States are stored in
that order: for every vector of codes, its words' first numbers, then their second ones.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from core.system.native import numbers
from core.system.native.ir import Code, splat

BLOCK = 32  # numbers that share a power of two
TOP = 14  # how far its exponent lies below that of the largest number
SMALLEST = 16  # bytes: the narrowest vector used
LINE = 64  # bytes: alignment of the parts of a state


class Plane(NamedTuple):
    """Codes of `bits` bits, lowest first; each contributes `weight` times its excess over `offset`."""

    bits: int
    offset: int
    weight: int
    at: int  # byte offset in a slot

    @property
    def per_word(self) -> int:
        return 16 // self.bits


class CodeRun(NamedTuple):
    """A run of one plane's codes that is multiplied as one vector, repeated `turns` times."""

    start: int  # first input
    turns: int
    codes: int  # inputs per repetition
    bytes: int  # of codes per repetition: read at once
    words: int  # 16-bit numbers of the vector: more than read where that is below SMALLEST

    @property
    def lanes(self) -> int:
        """32-bit sums: each covers two words."""
        return self.words // 2


def code_runs(inputs: int, plane: Plane, width: int) -> Iterator[CodeRun]:
    """Cut a row of `inputs`, a multiple of 32, into vectors of `width` bytes of codes and narrower ones at its end."""
    start = 0
    while start < inputs:
        codes = width * 8 // plane.bits
        if turns := (inputs - start) // codes:
            yield CodeRun(start, turns, codes, width, max(width, SMALLEST) // 2)
            start += turns * codes
        width //= 2


class CodeRunOffsets(NamedTuple):
    """Byte offsets of a piece's numbers within a state."""

    numbers: int  # i16, in the order of the codes
    steps: int  # one fp32 per lane: factor of its sum
    offsets: int  # one i32 per lane: initial value of its sum


class StateLayout:
    """Memory layout of one state [inputs]. `group` = inputs per group sum; 0 = no group sums."""

    def __init__(self, inputs: int, group: int, planes: tuple[Plane, ...], width: int) -> None:
        self.inputs, self.group, self.planes, self.width = inputs, group, planes, width
        self.bytes = 0
        self.places = {
            (p, run): CodeRunOffsets(
                self._take(run.turns * run.words * plane.per_word * 2),
                self._take(run.turns * run.lanes * 4),
                self._take(run.turns * run.lanes * 4),
            )
            for p, plane in enumerate(planes)
            for run in code_runs(inputs, plane, width)
        }
        self.sums = self._take(inputs // group * 4 if group else 0)  # one fp32 per group

    def _take(self, size: int) -> int:
        start = self.bytes
        self.bytes += -(-size // LINE) * LINE
        return start


def prepare(name: str, layout: StateLayout, dtype: torch.dtype) -> Code:
    """Generates the function name(x, into): converts one state of a type into its layout, which must be zeroed."""
    code = Code(f"void @{name}(ptr noalias %x, ptr noalias %into)")
    if layout.group:
        with code.loop(0, layout.inputs // layout.group) as each:
            code.store("float", "0.0", code.at(code.at("%into", layout.sums), each.index, 4))
    for (p, run), place in layout.places.items():
        plane = layout.planes[p]
        with code.loop(0, run.turns) as each, code.loop(0, run.codes // BLOCK) as block:
            first = code.add(code.times(each.index, run.codes), run.start)
            at = code.add(first, code.times(block.index, BLOCK))
            sizes = run.words * plane.per_word * 2, run.lanes * 4, run.lanes * 4
            into = [
                code.at(code.at(code.at("%into", start), each.index, size), block.index, 4 * plane.bits)
                for start, size in zip(place, sizes, strict=True)
            ]
            whole, step = _whole(code, numbers.load(code, "%x", at, BLOCK, dtype))
            _scatter(code, whole, step, plane, run, into)
            if layout.group and p == 0:
                group = code.let(f"udiv i64 {at}, {layout.group}")
                _count(code, whole, step, code.at(code.at("%into", layout.sums), group, 4))
    return code


INTS = f"<{BLOCK} x i32>"


def _whole(code: Code, x: str) -> tuple[str, str]:
    """Convert 32 fp32 to integers (i32) of at most 15 bits and a sign, and the float that one unit stands for."""
    floats = f"<{BLOCK} x float>"
    bits = code.let(f"bitcast {floats} {x} to {INTS}")
    bits = code.let(f"and {INTS} {bits}, {splat('i32', BLOCK, 0x7FFFFFFF)}")
    largest = code.call("i32", f"llvm.vector.reduce.umax.v{BLOCK}i32", (INTS, bits))
    exponent = code.let(f"lshr i32 {largest}, 23")
    exponent = code.call("i32", "llvm.umax.i32", ("i32", exponent), ("i32", str(TOP + 1)))
    finite = code.let(f"icmp ult i32 {exponent}, 255")
    step = code.let(f"sub i32 {exponent}, {TOP}")
    step = code.let(f"shl i32 {step}, 23")
    step = code.let(f"select i1 {finite}, i32 {step}, i32 {0x7FC00000}")  # otherwise every result becomes NaN
    step = code.let(f"bitcast i32 {step} to float")
    inverse = code.let(f"sub i32 {254 + TOP}, {exponent}")
    inverse = code.let(f"shl i32 {inverse}, 23")
    inverse = code.broadcast("float", code.let(f"bitcast i32 {inverse} to float"), BLOCK)
    scaled = code.let(f"fmul {floats} {x}, {inverse}")
    scaled = code.let(f"select i1 {finite}, {floats} {scaled}, {floats} zeroinitializer")
    near = code.call(floats, f"llvm.rint.v{BLOCK}f32", (floats, scaled))  # < 2 ** 15: inputs have at most 11 bits
    return code.let(f"fptosi {floats} {near} to {INTS}"), step


def _scatter(code: Code, whole: str, step: str, plane: Plane, run: CodeRun, into: Sequence[str]) -> None:
    """Store 32 integers at the positions that match their codes; `into` as in CodeRunOffsets."""
    places, steps, offsets = into
    words = 2 * plane.bits  # words that hold their codes
    short = code.let(f"trunc {INTS} {whole} to <{BLOCK} x i16>")
    for s in range(plane.per_word):
        part = code.pick(f"<{BLOCK} x i16>", short, range(s, BLOCK, plane.per_word))
        code.store(f"<{words} x i16>", part, code.at(places, s * run.words * 2), 2)
    code.store(f"<{plane.bits} x float>", code.broadcast("float", step, plane.bits), steps, 4)
    if plane.offset:
        sums, ints = _halved(code, whole, plane.bits), f"<{plane.bits} x i32>"
        sums = code.let(f"mul {ints} {sums}, {splat('i32', plane.bits, -plane.offset)}")
        code.store(ints, sums, offsets, 4)


def _count(code: Code, whole: str, step: str, place: str) -> None:
    """Add the sum of 32 integers, as a float, to the one at `place`."""
    total = code.let(f"extractelement <1 x i32> {_halved(code, whole, 1)}, i32 0")
    value = code.let(f"sitofp i32 {total} to float")
    value = code.let(f"fmul float {value}, {step}")
    before = code.load("float", place, 4)
    code.store("float", code.let(f"fadd float {before}, {value}"), place, 4)


def _halved(code: Code, value: str, until: int) -> str:
    """Sum neighbours until 32 integers become `until`."""
    count = BLOCK
    while count > until:
        even, odd = (code.pick(f"<{count} x i32>", value, range(odd, count, 2)) for odd in (0, 1))
        count //= 2
        value = code.let(f"add <{count} x i32> {even}, {odd}")
    return value
