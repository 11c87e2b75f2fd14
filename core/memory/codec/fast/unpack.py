"""Weights of a row in fp32, as LLVM instructions, for kernels whose sums do not run along the rows of a matrix.

A weight is a plain number, or entry * scale, or fma(entry, scale, zero), rounded to fp32, where an entry is the table's
number of a code, or code - offset. A scale of a whole row, and one of a group, are used alike; where there are both,
the scale is their product. Where `wide` inputs share numbers, scales and zeros are integers times these.
"""

from core.memory.codec.bits import PLANES
from core.memory.codec.fast.layout import LANES
from core.memory.codec.matrix import Matrix, Part
from core.memory.codec.tables import TABLES
from core.system.native import numbers
from core.system.native.ir import Code, fp32, splat, vector

SOME = 32  # weights that are unpacked together
FLOATS, INTS = f"<{LANES} x float>", f"<{LANES} x i32>"


def serves(matrix: Matrix) -> bool:
    """Whether its weights can be read so."""
    return not matrix.transposed and not (matrix.bits and (matrix.inputs % SOME or matrix.group % LANES))


def unpacked(
    code: Code, matrix: Matrix, slot: str, row: str, first: str, count: int = SOME, *, fused: bool = True
) -> list[str]:
    """`count` weights, at most SOME, of a row from `first`, a multiple of SOME, on: eight in each vector, 0 after the
    last one. Codes come SOME at a time. Without `fused` a weight is rounded before its zero is added, too."""
    if not matrix.bits:
        begin = code.at(code.at(slot, matrix.codes.at), row, matrix.inputs * matrix.codes.dtype.itemsize)
        return [
            code.padded("float", numbers.load(code, begin, code.add(first, at), some, matrix.codes.dtype), some, LANES)
            for at in range(0, count, LANES)
            for some in (min(LANES, count - at),)
        ]
    assert count == SOME and matrix.scale is not None
    by_row = _number(code, slot, row, matrix.row) if matrix.row and not matrix.wide else ""
    found, scale, zero = [], "", ""
    for at in range(0, SOME, LANES):
        if at % (matrix.group or SOME) == 0:
            group = code.add(first, at)
            scale = _shared(code, matrix, slot, row, group, matrix.scale)
            scale = code.let(f"fmul {FLOATS} {scale}, {by_row}") if by_row else scale
            zero = _shared(code, matrix, slot, row, group, matrix.zero) if matrix.zero else ""
        entry = _entries(code, matrix, slot, row, code.add(first, at))
        if zero and fused:
            found.append(code.fma(entry, scale, zero))
        else:
            entry = code.let(f"fmul {FLOATS} {entry}, {scale}")
            found.append(code.let(f"fadd {FLOATS} {entry}, {zero}") if zero else entry)
    return found


def _shared(code: Code, matrix: Matrix, slot: str, row: str, first: str, part: Part) -> str:
    """The scale or zero of a group, in every lane."""
    at = row
    if matrix.group:
        group = code.let(f"udiv i64 {first}, {matrix.group}")
        at = code.add(code.times(row, matrix.inputs // matrix.group), group)
    number = _number(code, slot, at, part)
    if not matrix.wide:
        return number
    assert matrix.row is not None
    each = 1 if matrix.zero is None else 2
    shared = code.times(code.let(f"udiv i64 {first}, {matrix.wide}"), each)
    at = code.add(code.times(row, matrix.inputs // matrix.wide * each), shared)
    by = _number(code, slot, code.add(at, int(part == matrix.zero)), matrix.row)
    return code.let(f"fmul {FLOATS} {number}, {by}")


def _number(code: Code, slot: str, at: str, part: Part) -> str:
    """A number of a part, in every lane."""
    one = numbers.load(code, code.at(slot, part.at), at, 1, part.dtype)
    return code.broadcast("float", code.first(one), LANES)


def _entries(code: Code, matrix: Matrix, slot: str, row: str, first: str) -> str:
    """What eight codes stand for, before they are scaled."""
    codes, below = "", 0
    for part, bits in zip((matrix.codes, matrix.high), PLANES[matrix.bits], strict=False):
        assert part is not None
        begin = code.at(code.at(slot, part.at), row, matrix.inputs * bits // 8)
        begin = code.at(begin, code.let(f"udiv i64 {code.times(first, bits)}, 8"))
        if bits == 8:
            raw = code.load(f"<{LANES} x i8>", begin)
            return code.let(f"sitofp {INTS} {code.let(f'sext <{LANES} x i8> {raw} to {INTS}')} to {FLOATS}")
        raw = code.load(f"i{LANES * bits}", begin)
        wide = raw if bits == 4 else code.let(f"zext i{LANES * bits} {raw} to i32")
        shifts = vector("i32", range(0, LANES * bits, bits))
        found = code.let(f"lshr {INTS} {code.broadcast('i32', wide, LANES)}, {shifts}")
        found = code.let(f"and {INTS} {found}, {splat('i32', LANES, (1 << bits) - 1)}")
        if below:
            higher = code.let(f"shl {INTS} {found}, {splat('i32', LANES, below)}")
            found = code.let(f"or {INTS} {codes}, {higher}")
        codes, below = found, below + bits
    if not matrix.table:
        middle = splat("i32", LANES, matrix.offset)
        return code.let(f"sitofp {INTS} {code.let(f'sub {INTS} {codes}, {middle}')} to {FLOATS}")
    entries = [fp32(one) for one in TABLES[matrix.table]] * max(1, LANES // len(TABLES[matrix.table]))
    halves = [
        code.call(FLOATS, "llvm.x86.avx2.permps", (FLOATS, vector("float", some)), (INTS, codes))
        for some in (entries[:LANES], entries[LANES:])
        if some
    ]
    if len(halves) == 1:
        return halves[0]
    low = code.let(f"icmp ult {INTS} {codes}, {splat('i32', LANES, LANES)}")
    return code.let(f"select <{LANES} x i1> {low}, {FLOATS} {halves[0]}, {FLOATS} {halves[1]}")
