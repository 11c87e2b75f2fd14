"""Many states times a matrix in bfloat16, as LLVM instructions: for CPUs without instructions for such numbers.

torch's own product takes one sum after the other there, and reads both of its rows anew for each. SUMS partial sums in
fp32 share it, of the inputs that are as many apart, and are then added up by halves. Here those of several rows and
states are taken together, one vector of each at a time, which adds the same numbers in the same order: the bits are
torch's. Products of two numbers of bfloat16 are exact in fp32, so that fused multiply-adds round no differently.
"""

from collections.abc import Callable

import torch

from core.system.native import numbers
from core.system.native.ir import Code, splat

SUMS = 64  # partial sums of a number of the result; what inputs have to be a multiple of
ROWS, STATES = 2, 3  # multiplied at once: with more, sums had to leave the registers, and it took longer
OUTPUTS = 32  # rows that a thread takes at a time
AT_ONCE = 96  # states that stay in the cache while these rows are multiplied; a multiple of STATES
HIGH = -(1 << 16)  # of an i32 that holds two numbers: the bits of the second, as fp32


def product(name: str, inputs: int, outputs: int, width: int, rows: Callable[[Code, str, str], str]) -> Code:
    """Generates the function name(header, slot, nothing, from, to), whose arguments and `rows` are those of
    `core.memory.codec.native.tiles.product`; vectors have `width` bytes, which changes no bit."""
    code = Code(f"void @{name}(ptr %header, ptr noalias %slot, ptr %nothing, i64 %from, i64 %to)")
    x, count, out = (code.load(kind, code.at("%header", 8 * i), 8) for i, kind in enumerate(("ptr", "i64", "ptr")))
    stride = inputs * 2
    with code.loop("%from", "%to", OUTPUTS) as block:
        begin = rows(code, block.index, code.add(block.index, OUTPUTS))
        with code.loop(0, count, AT_ONCE) as many:
            left = code.let(f"sub i64 {count}, {many.index}")
            now = code.least(left, AT_ONCE)
            whole = code.whole(now, STATES)
            with code.loop(0, OUTPUTS, ROWS) as row:
                first = code.at(begin, row.index, stride)
                for start, end, size in ((0, whole, STATES), (whole, now, 1)):
                    with code.loop(start, end, size) as some:
                        at = code.add(many.index, some.index)
                        states = code.at(x, at, stride)
                        into = code.add(code.times(at, outputs), code.add(block.index, row.index))
                        _tile(code, size, first, states, inputs, width // 4, code.at(out, into, 2), outputs * 2)
    return code


def _tile(code: Code, states: int, weights: str, x: str, inputs: int, lanes: int, out: str, out_stride: int) -> None:
    """ROWS rows of the matrix times `states` states, into `out`."""
    ints, floats, stride = f"<{lanes} x i32>", f"<{lanes} x float>", inputs * 2
    pairs = [(r, s) for s in range(states) for r in range(ROWS)]

    def sums(first: int, odd: bool) -> list[str]:
        """Of each pair the partial sums of every second input from the `first` on."""
        with code.loop(0, inputs // SUMS, 1, [(floats, "zeroinitializer")] * len(pairs)) as each:

            def vector(begin: str, row: int) -> str:
                at = code.at(code.at(begin, row * stride + first * 2), each.index, SUMS * 2)
                raw = code.load(ints, at, 2)
                way = (
                    f"and {ints} {raw}, {splat('i32', lanes, HIGH)}" if odd else f"shl {ints} {raw}, {_sixteen(lanes)}"
                )
                return code.let(f"bitcast {ints} {code.let(way)} to {floats}")

            seen = [vector(x, s) for s in range(states)]
            after = dict(zip(pairs, each.values, strict=True))
            for r in range(ROWS):  # one at a time: there are no registers for more
                held = vector(weights, r)
                for s in range(states):
                    after[r, s] = code.fma(held, seen[s], after[r, s], lanes)
            each.next = [after[pair] for pair in pairs]
        return each.values

    halves = []
    for odd in (False, True):
        found = [sums(first, odd) for first in range(0, SUMS, 2 * lanes)]
        halves.append([code.halved(floats, [*of]) for of in zip(*found, strict=True)])
    for s in range(states):
        even, odd_ = (_folded(code, of[s * ROWS : (s + 1) * ROWS], lanes) for of in halves)
        total = _sum(code, f"<{ROWS} x float>", even, odd_)
        numbers.store(code, total, code.at(out, s * out_stride), 0, ROWS, torch.bfloat16)


def _folded(code: Code, vectors: list[str], lanes: int) -> str:
    """The sum of the lanes of each vector, by halves, as one vector."""
    size, each = lanes, lanes  # lanes of a vector, and those in it that belong to one sum
    while each > 1:
        half, kind = each // 2, f"<{size} x float>"
        low = [at for at in range(size) if at % each < half]
        if len(vectors) > 1:
            low += [at + size for at in low]
            taken = [*zip(vectors[::2], vectors[1::2], strict=True)]
        else:
            taken = [(vectors[0], "poison")]
        made = []
        for one, other in taken:
            parts = (code.pick(kind, one, places, other) for places in (low, [at + half for at in low]))
            made.append(_sum(code, f"<{len(low)} x float>", *parts))
        vectors, size, each = made, len(low), half
    return vectors[0]


def _sum(code: Code, kind: str, one: str, other: str) -> str:
    return code.let(f"fadd {kind} {one}, {other}")


def _sixteen(lanes: int) -> str:
    return splat("i32", lanes, 16)
