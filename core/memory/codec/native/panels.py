"""Many states times a matrix in fp32, as LLVM instructions: out of codes, for CPUs without products of bfloat16 pairs.

A panel is as many states as a vector has lanes, turned and in fp32: for each input the numbers of all of them lie side
by side. A row of the matrix is dequantised once for all states, without a copy of the matrix in memory, and one number
of it at a time is multiplied by a vector of a panel. Every sum has the products of one row and one state alone, in the
order of the inputs: it does not depend on how many states there are, on threads, or on the width of vectors.
"""

from collections.abc import Callable

import torch

from core.memory.codec.native.tiles import spans, transposed
from core.system.native import numbers
from core.system.native.ir import Code

ROWS = {3: 4, 2: 4, 1: 8}  # multiplied by so many panels at once: their sums take 12 or 8 of the 16 registers
PANELS = max(ROWS)
OUTPUTS = 16  # rows that a thread takes at a time
SPAN = 1024  # inputs that are multiplied before the next tile of states: what they take stays in the cache
AT_ONCE = 10 * PANELS  # panels whose sums are kept at a time; a multiple of PANELS
HEADER = 4  # fields of 8 bytes: the addresses of the states and of the panels, how many states, and where results go


def turn(name: str, inputs: int, width: int, dtype: torch.dtype) -> Code:
    """Generates the function name(header, nothing, nothing, from, to): makes panels from..to - 1 out of the states. A
    panel that is not full repeats the last state."""
    code, lanes = Code(f"void @{name}(ptr %header, ptr %slot, ptr %nothing, i64 %from, i64 %to)"), width // 4
    x, panels, count, _ = _header(code)
    with code.loop("%from", "%to") as panel:
        into = code.at(panels, panel.index, lanes * inputs * 4)
        states = [code.at(x, _state(code, count, panel.index, lanes, s), inputs * dtype.itemsize) for s in range(lanes)]
        with code.loop(0, inputs, lanes) as each:
            rows = [numbers.load(code, state, each.index, lanes, dtype) for state in states]
            for i, value in enumerate(transposed(code, f"<{lanes} x float>", rows)):
                code.store(f"<{lanes} x float>", value, code.at(into, code.add(each.index, i), lanes * 4), width)
    return code


def product(
    name: str, inputs: int, outputs: int, width: int, dtype: torch.dtype, rows: Callable[[Code, str, str], None]
) -> Code:
    """Generates the function name(header, slot, nothing, from, to): rows from..to - 1 of a matrix [outputs, inputs], a
    multiple of OUTPUTS, times all panels. Results [states, outputs] are rounded once, to `dtype`.

    `rows(code, first, last)` appends what makes rows first..last - 1 of the matrix in fp32 at %made, which is on the
    thread's stack."""
    code, lanes = Code(f"void @{name}(ptr %header, ptr noalias %slot, ptr %nothing, i64 %from, i64 %to)"), width // 4
    sums = code.stack(AT_ONCE * OUTPUTS * width, width)
    code.do(f"%made = alloca [{OUTPUTS * inputs * 4} x i8], align {width}")
    _, panels, count, out = _header(code)
    every = code.let(f"udiv i64 {code.add(count, lanes - 1)}, {lanes}")
    with code.loop("%from", "%to", OUTPUTS) as block:
        rows(code, block.index, code.add(block.index, OUTPUTS))
        with code.loop(0, every, AT_ONCE) as many:
            left = code.let(f"sub i64 {every}, {many.index}")
            now = code.least(left, AT_ONCE)
            ends = [code.whole(now, size) for size in (PANELS, 1)]
            pairs = code.let(f"and i64 {code.let(f'sub i64 {now}, {ends[0]}')}, 2")
            ends.insert(1, code.add(ends[0], pairs))
            for start, length in spans(inputs, SPAN):
                for size, begin, end in zip(ROWS, ["0", *ends], ends, strict=False):
                    with code.loop(begin, end, size) as some, code.loop(0, OUTPUTS, ROWS[size]) as row:
                        first = code.add(many.index, some.index)
                        states = code.at(code.at(panels, first, lanes * inputs * 4), start * width)
                        weights = code.at("%made", code.add(code.times(row.index, inputs), start), 4)
                        kept = code.add(code.times(some.index, OUTPUTS), code.times(row.index, size))
                        at = code.at(sums, kept, width)
                        found = _tile(code, size, lanes, weights, states, inputs, length, at if start else "")
                        if start + length < inputs:
                            for i, total in enumerate(found):
                                code.store(f"<{lanes} x float>", total, code.at(at, i * width), width)
                        else:
                            into = code.at(out, code.add(block.index, row.index), dtype.itemsize)
                            for v in range(size):
                                states_of = [_state(code, count, code.add(first, v), lanes, s) for s in range(lanes)]
                                _write(code, found[v::size], lanes, into, states_of, outputs, dtype)
    return code


def _header(code: Code) -> list[str]:
    return [code.load("i64" if i == 2 else "ptr", code.at("%header", 8 * i), 8) for i in range(HEADER)]


def _state(code: Code, count: str, panel: str, lanes: int, lane: int) -> str:
    """Which state is in a lane of a panel: the last one where there are no more."""
    state, last = code.add(code.times(panel, lanes), lane), code.add(count, -1)
    return code.least(state, last)


def _tile(
    code: Code, size: int, lanes: int, weights: str, states: str, inputs: int, length: int, before: str
) -> list[str]:
    """ROWS[size] rows times `size` panels over `length` inputs: the sums, of each row for each panel, which go on from
    those at `before`, or from 0."""
    kind = f"<{lanes} x float>"
    count = ROWS[size] * size
    begun = [code.load(kind, code.at(before, i * lanes * 4), lanes * 4) for i in range(count)] if before else []
    first = [(kind, total) for total in begun or ["zeroinitializer"] * count]
    with code.loop(0, length, 1, first) as each:
        seen = [
            code.load(kind, code.at(code.at(states, v * lanes * inputs * 4), each.index, lanes * 4), lanes * 4)
            for v in range(size)
        ]
        after = []
        for r in range(ROWS[size]):
            weight = code.load("float", code.at(code.at(weights, r * inputs * 4), each.index, 4), 4)
            held = code.broadcast("float", weight, lanes)
            after += [code.fma(held, one, each.values[r * size + v], lanes) for v, one in enumerate(seen)]
        each.next = after
    return each.values


def _write(
    code: Code, found: list[str], lanes: int, out: str, states: list[str], outputs: int, dtype: torch.dtype
) -> None:
    """Round the sums of some rows for a panel, and store those of each state side by side."""
    shorts, few = f"<{lanes} x i16>", 4
    places = [r * lanes + s for s in range(lanes) for r in range(few)]
    for first in range(0, len(found), few):
        rows = []
        for total in found[first : first + few]:
            kind, value = numbers.rounded(code, total, lanes, dtype)
            rows.append(code.let(f"bitcast {kind} {value} to {shorts}"))
        pairs = [code.pick(shorts, rows[i], range(2 * lanes), rows[i + 1]) for i in range(0, few, 2)]
        turned = code.pick(f"<{2 * lanes} x i16>", pairs[0], places, pairs[1])
        whole = code.let(f"bitcast <{few * lanes} x i16> {turned} to <{lanes} x i64>")
        for s, state in enumerate(states):
            one = code.let(f"extractelement <{lanes} x i64> {whole}, i32 {s}")
            at = code.add(code.times(state, outputs), first)
            code.store("i64", one, code.at(out, at, dtype.itemsize), dtype.itemsize)
