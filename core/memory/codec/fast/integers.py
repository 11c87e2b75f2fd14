"""Vectors of codes as integers of 8 bits, and their products with integers of x, as LLVM instructions."""

from core.memory.codec.fast.layout import LEVELS, MOST, VECTOR, Meaning
from core.system.native.ir import Code, splat, vector

BYTES, SHORTS, INTS = "<32 x i8>", "<16 x i16>", "<8 x i32>"


def spread(code: Code, raw: str, count: int) -> str:
    """`count` bytes of bits that are stored apart as a vector: the lowest bits of each byte are those of one byte of
    codes, and all others may be anything."""
    if count == VECTOR:
        return raw
    width = VECTOR // count * 8
    kind, wide, size = f"<{count} x i{width}>", width, 8
    value = code.let(f"zext <{count} x i8> {raw} to {kind}")
    while wide > 8:  # the upper half of what is together moves up, until each is in a byte of its own
        wide, size = wide // 2, size // 2
        moved = code.let(f"shl {kind} {value}, {splat(f'i{width}', count, wide - size)}")
        value = code.let(f"or {kind} {value}, {moved}")
    return code.let(f"bitcast {kind} {value} to {BYTES}")


def integers(code: Code, meant: Meaning, raw: list[str]) -> list[str]:
    """A vector of codes as vectors of bytes: those of each shift. `raw`: of each plane, the upper one spread."""
    low = meant.planes[0]
    if low.bits == 8:
        return raw
    planes = [code.let(f"bitcast {BYTES} {one} to {SHORTS}") for one in raw]
    found = []
    for shift in range(low.per_byte):
        value, below = "", 0
        for plane, words in zip(meant.planes, planes, strict=True):
            part = shifted(code, words, shift * plane.bits - below)
            mask = ((1 << plane.bits) - 1 << below) * 0x0101
            part = code.let(f"and {SHORTS} {part}, {splat('i16', 16, mask)}")
            value, below = code.let(f"or {SHORTS} {value}, {part}") if value else part, below + plane.bits
        value = code.let(f"bitcast {SHORTS} {value} to {BYTES}")
        if meant.entries:
            table = vector("i8", [entry & 255 for entry in meant.entries] * (VECTOR // len(meant.entries)))
            value = code.call(BYTES, "llvm.x86.avx2.pshuf.b", (BYTES, table), (BYTES, value))
        found.append(value)
    return found


def shifted(code: Code, words: str, by: int) -> str:
    """Shifted right; left where `by` is below 0."""
    if not by:
        return words
    return code.let(f"{'lshr' if by > 0 else 'shl'} {SHORTS} {words}, {splat('i16', 16, abs(by))}")


def pairs(code: Code, meant: Meaning, held: str, magnitude: str, x: str) -> str:
    """<16 x i16>: sums of two products of codes and integers of x each. `held`: codes, `magnitude`: the same without
    signs."""
    if not meant.most:
        x = code.call(BYTES, "llvm.x86.avx2.psign.b", (BYTES, x), (BYTES, held))
    return code.call(SHORTS, "llvm.x86.avx2.pmadd.ub.sw", (BYTES, magnitude), (BYTES, x))


def magnitudes(code: Code, meant: Meaning, held: str) -> str:
    """Codes without signs."""
    return held if meant.most else code.call(BYTES, "llvm.abs.v32i8", (BYTES, held), ("i1", "false"))


def added_in_16_bits(meant: Meaning) -> int:
    """Sums of two products that 16 bits hold the sum of."""
    return MOST // (2 * LEVELS * (meant.most or max(map(abs, meant.entries), default=LEVELS)))


def widened(code: Code, shorts: str) -> str:
    """<8 x i32>: sums of neighbours."""
    return code.call(INTS, "llvm.x86.avx2.pmadd.wd", (SHORTS, shorts), (SHORTS, splat("i16", 16, 1)))
