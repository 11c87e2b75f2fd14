"""Many states times a matrix in bfloat16, as LLVM instructions: for CPUs that multiply pairs of such numbers.

A panel is OUTPUTS rows of the matrix over a range of its inputs, turned: for each pair of inputs the pairs of all rows
lie side by side, as the instruction takes them. It is made once for many states, out of plain numbers or of codes, and
stays in the processor's cache while they are multiplied.
"""

from collections.abc import Callable, Iterator

import torch

from core.system.native import numbers
from core.system.native.ir import Code

OUTPUTS = 64  # of a panel: four vectors
VECTORS = OUTPUTS // 16
STATES = 6  # multiplied at once: with four vectors of sums each they fill the registers
AT_ONCE = 240  # states whose sums are kept at a time; a multiple of STATES
PAIRS = 16  # of inputs, turned at once
HEADER = 3  # fields of 8 bytes
LINE = 64  # bytes
DOT = "llvm.x86.avx512bf16.dpbf16ps.512"
SUMS, NUMBERS = "<16 x float>", "<32 x bfloat>"


def spans(inputs: int, longest: int) -> Iterator[tuple[int, int]]:
    """(first input, how many): ranges that are summed from 0 each, and then added up."""
    return ((start, min(longest, inputs - start)) for start in range(0, inputs, longest))


def product(
    name: str, inputs: int, outputs: int, span: int, rows: Callable[[Code, str, str], str], made: int = 0
) -> Code:
    """Generates the function name(header, slot, nothing, from, to): rows from..to - 1 of a matrix [outputs, inputs], a
    multiple of OUTPUTS, times states. The header has the address of the states [n, inputs], n, and the address of what
    is written, [n, outputs]. Sums are fp32, of `span` inputs at a time in their order, and rounded once.

    `rows(code, first, last)` appends what finds or makes rows first..last - 1 of the matrix -> the address of the
    first of them, [OUTPUTS, inputs] in bfloat16, which may be %made, `made` bytes of the thread's stack."""
    code = Code(f"void @{name}(ptr %header, ptr noalias %slot, ptr %nothing, i64 %from, i64 %to)")
    ranges = [*spans(inputs, span)]
    panel = code.stack(min(span, inputs) * OUTPUTS * 2, LINE)
    sums = code.stack(AT_ONCE * OUTPUTS * 4, LINE)
    if made:
        code.do(f"%made = alloca [{made} x i8], align {LINE}")
    x, count, out = (code.load(kind, code.at("%header", 8 * i), 8) for i, kind in enumerate(("ptr", "i64", "ptr")))
    with code.loop("%from", "%to", OUTPUTS) as block:
        begin = rows(code, block.index, code.add(block.index, OUTPUTS))
        with code.loop(0, count, AT_ONCE) as many:
            left = code.let(f"sub i64 {count}, {many.index}")
            now = code.least(left, AT_ONCE)
            whole = code.whole(now, STATES)
            for start, length in ranges:
                _turn(code, code.at(begin, start * 2), inputs * 2, length, panel)
                more = start + length < inputs  # else the rows that this thread may take next
                ahead = code.at(begin, (start + length) * 2 if more else 2 * OUTPUTS * inputs * 2)
                states = code.at(code.at(x, many.index, inputs * 2), start * 2)
                for begins, ends, size in ((0, whole, STATES), (whole, now, 1)):
                    with code.loop(begins, ends, size) as some:
                        given = code.at(states, some.index, inputs * 2)
                        into = code.at(sums, some.index, OUTPUTS * 4)
                        tile = code.let(f"udiv i64 {some.index}, {STATES}") if size > 1 else ""
                        _tile(code, size, given, inputs * 2, panel, into, length, ahead, tile, fresh=not start)
            with code.loop(0, now) as each:
                row = code.at(out, code.add(code.times(code.add(many.index, each.index), outputs), block.index), 2)
                for v in range(VECTORS):
                    total = code.load(SUMS, code.at(code.at(sums, each.index, OUTPUTS * 4), v * LINE), LINE)
                    numbers.store(code, total, code.at(row, v * 32), 0, 16, torch.bfloat16)
    return code


def _turn(code: Code, begin: str, stride: int, length: int, panel: str) -> None:
    """Write a panel of rows of `length` numbers, `stride` bytes apart."""
    with code.loop(0, VECTORS) as vector, code.loop(0, length // 2, PAIRS) as each:
        first = code.at(code.at(begin, vector.index, 16 * stride), each.index, 4)
        found = [code.load("<16 x i32>", code.at(first, r * stride), 2) for r in range(16)]
        into = code.at(code.at(panel, each.index, OUTPUTS * 4), vector.index, LINE)
        for i, value in enumerate(transposed(code, "<16 x i32>", found)):
            code.store("<16 x i32>", value, code.at(into, i * OUTPUTS * 4), LINE)


def transposed(code: Code, kind: str, rows: list[str]) -> list[str]:
    """As many vectors of a kind as each has numbers, a power of two: the halves of blocks of 1, 2, 4 and 8 numbers
    change places."""
    count, size = len(rows), 1
    while size < count:
        low = [count + i - size if i & size else i for i in range(count)]
        high = [place + size for place in low]
        made = list(rows)
        for i in (i for i in range(count) if not i & size):
            made[i] = code.pick(kind, rows[i], low, rows[i + size])
            made[i + size] = code.pick(kind, rows[i], high, rows[i + size])
        rows, size = made, 2 * size
    return rows


def _tile(
    code: Code,
    count: int,
    x: str,
    stride: int,
    panel: str,
    sums: str,
    length: int,
    ahead: str,
    tile: str,
    *,
    fresh: bool,
) -> None:
    """`count` states times a panel: sums over its inputs, stored, or added where they are not `fresh`. Whole tiles also
    fetch what is turned next, from `ahead` on, each a few of its rows."""
    first = [(SUMS, "zeroinitializer")] * (count * VECTORS)
    lines, few = length * 2 // LINE, 2
    with code.loop(0, length // 2, 1, first) as each:
        if tile and lines and not lines & (lines - 1):
            row = code.let(f"udiv i64 {each.index}, {lines}")
            row = code.add(row, code.times(tile, PAIRS * few))
            place = code.at(code.at(ahead, row, stride), code.let(f"and i64 {each.index}, {lines - 1}"), LINE)
            for i in range(few):
                code.prefetch(code.at(place, i * PAIRS * stride), 2)
        at = code.at(panel, each.index, OUTPUTS * 4)
        pairs = [code.load(NUMBERS, code.at(at, v * LINE), LINE) for v in range(VECTORS)]
        after = []
        for s in range(count):
            pair = code.load("i32", code.at(code.at(x, s * stride), each.index, 4), 2)
            seen = code.let(f"bitcast <16 x i32> {code.broadcast('i32', pair, 16)} to {NUMBERS}")
            for v in range(VECTORS):
                total = each.values[s * VECTORS + v]
                after.append(code.call(SUMS, DOT, (SUMS, total), (NUMBERS, seen), (NUMBERS, pairs[v])))
        each.next = after
    for i, total in enumerate(each.values):
        at = code.at(sums, i * LINE)
        total = total if fresh else code.let(f"fadd {SUMS} {code.load(SUMS, at, LINE)}, {total}")
        code.store(SUMS, total, at, LINE)
