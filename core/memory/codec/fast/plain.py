"""Rows of plain numbers times rows of x, as LLVM instructions: several of each at once, whose sums do not mix."""

import torch

from core.memory.codec.fast.layout import LANES
from core.memory.codec.fast.rows import FLOATS, ZERO, Given, apart, tree
from core.memory.codec.fast.shares import slots_of
from core.memory.codec.matrix import Matrix
from core.system.native import numbers
from core.system.native.ir import Code

TILES = ((2, 6), (3, 4), (3, 3), (4, 2), (4, 1))  # rows of the matrix and of x that are multiplied at once
KEPT = 128 << 10  # bytes of the matrix that stay in the cache while all rows of x pass
LINE = 64  # bytes
COLUMNS, AT_ONCE = 32, 2  # columns of a matrix [inputs, outputs], and lanes of their sums, that are multiplied at once


def padded(inputs: int) -> int:
    """Numbers of a prepared row of x: whole cache lines."""
    return -(-inputs // 16) * 16


def prepare(name: str, inputs: int, dtype: torch.dtype) -> Code:
    """Generates the function name(x, into): a row of x in fp32."""
    code = Code(f"void @{name}(ptr noalias %x, ptr noalias %into)")
    with code.loop(0, inputs // LANES) as each:
        at = code.times(each.index, LANES)
        code.store(FLOATS, numbers.load(code, "%x", at, LANES, dtype), code.at("%into", at, 4), 4)
    if rest := inputs % LANES:
        first = inputs - rest
        code.store(f"<{rest} x float>", numbers.load(code, "%x", first, rest, dtype), code.at("%into", first, 4), 4)
    return code


def multiply(code: Code, matrix: Matrix, out: torch.dtype, given: Given) -> None:
    """Append: rows %from..%to - 1 of the matrix in %slot times the prepared rows of x, each rounded once."""
    if matrix.transposed:
        _multiply_columns(code, matrix, out, given)
        return
    begins = [code.at(slot, matrix.codes.at) for slot in slots_of(code, matrix)]
    kept = max(LANES, KEPT // (matrix.inputs * matrix.codes.dtype.itemsize) & -LANES)
    with code.loop("%from", "%to", kept) as some:
        last = code.least(code.add(some.index, kept), "%to")
        done = "0"
        for at_once, states in TILES:
            left = code.let(f"sub i64 {given.count}, {done}")
            until = code.add(done, code.whole(left, states))
            with code.loop(done, until, states) as state:
                for rows in apart(code, some.index, last, at_once):
                    _tile(code, matrix, begins, rows, given, (state.index, states), out)
            done = until


def _tile(
    code: Code,
    matrix: Matrix,
    begins: list[str],
    rows: list[str],
    given: Given,
    some_states: tuple[str, int],
    dtype: torch.dtype,
) -> None:
    """Rows of the matrix times (first, how many) rows of x. `begins`: of its numbers in each slot."""
    state, states = some_states
    own, stored = matrix.own, matrix.codes.dtype
    x = [given.row(code, code.add(state, s), padded(matrix.inputs) * 4) for s in range(states)]
    keys = [(r, s) for r in range(len(rows)) for s in range(states)]

    def step(weights: list[str], some: list[str], at: str | int, count: int, totals: list[str]) -> list[str]:
        held = [code.padded("float", numbers.load(code, one, at, count, stored), count, LANES) for one in weights]
        after = dict(zip(keys, totals, strict=True))
        for s, one in enumerate(some):
            seen = code.padded("float", code.load(f"<{count} x float>", code.at(one, at, 4), 4), count, LANES)
            for r in range(len(rows)):
                after[r, s] = code.fma(held[r], seen, after[r, s])
        return list(after.values())

    wide, totals = LINE // stored.itemsize, [ZERO] * len(keys)
    for number, begin in enumerate(begins):
        there = (
            [code.at(begin, row, own * stored.itemsize) for row in rows],
            [code.at(one, number * own, 4) for one in x],
        )
        with code.loop(0, own // wide, 1, [(FLOATS, total) for total in totals]) as each:
            totals = each.values
            for k in range(0, wide, LANES):
                totals = step(*there, code.add(code.times(each.index, wide), k), LANES, totals)
            each.next = totals
        totals = each.values
        for at in range(own // wide * wide, own, LANES):
            totals = step(*there, at, min(LANES, own - at), totals)
    for (r, s), total in zip(keys, totals, strict=True):
        numbers.store_one(code, tree(code, total), given.result(code, code.add(state, s)), rows[r], dtype)


def _multiply_columns(code: Code, matrix: Matrix, out: torch.dtype, given: Given) -> None:
    """The same of a matrix [inputs, outputs]: some columns at a time, a vector of sums for each of the eight lanes."""
    whole, rest = matrix.outputs // COLUMNS * COLUMNS, matrix.outputs % COLUMNS
    vectors = [(first, LANES) for first in range(0, COLUMNS, LANES)]
    last = code.least("%to", whole)
    with code.loop("%from", last, COLUMNS) as some, code.loop(0, given.count) as state:
        _columns(code, matrix, some.index, vectors, given, state.index, out)
    if rest:
        vectors = [(first, min(LANES, rest - first)) for first in range(0, rest, LANES)]
        begin = code.most("%from", whole)
        with code.loop(begin, "%to", COLUMNS) as some, code.loop(0, given.count) as state:
            _columns(code, matrix, some.index, vectors, given, state.index, out)


def _columns(
    code: Code, matrix: Matrix, begin: str, vectors: list[tuple[int, int]], given: Given, state: str, dtype: torch.dtype
) -> None:
    """Vectors (first, count) of columns from `begin` on times a row of x. The inputs of some lanes are read before
    those of the next: each line of memory is read once, and sums stay in registers."""
    stored, own, rest = matrix.codes.dtype, matrix.own, matrix.own % LANES
    all_x = given.row(code, state, padded(matrix.inputs) * 4)
    slots = slots_of(code, matrix)

    def step(slot: int, at: str | int, lanes: range, totals: list[str]) -> list[str]:
        weights = code.at(code.at(slots[slot], matrix.codes.at), begin, stored.itemsize)
        x = code.at(all_x, slot * own, 4)
        after, there = list[str](), LANES if isinstance(at, str) else rest
        for number, lane in enumerate(lanes):
            seen = row = ""
            if lane < there:
                place = code.add(at, lane) if isinstance(at, str) else at + lane
                row = code.at(weights, place, matrix.outputs * stored.itemsize)
                seen = code.broadcast("float", code.load("float", code.at(x, place, 4), 4), LANES)
            for v, (first, count) in enumerate(vectors):
                held = (
                    code.padded("float", numbers.load(code, row, first, count, stored), count, LANES) if row else ZERO
                )
                total = totals[number * len(vectors) + v]
                after.append(code.fma(held, seen or ZERO, total))
        return after

    sums = list[list[str]]()
    for start in range(0, LANES, AT_ONCE):
        lanes = range(start, start + AT_ONCE)
        found = [ZERO] * (AT_ONCE * len(vectors))
        for slot in range(matrix.blocks):
            with code.loop(0, own // LANES, 1, [(FLOATS, total) for total in found]) as each:
                each.next = step(slot, code.times(each.index, LANES), lanes, each.values)
            found = step(slot, own - rest, lanes, each.values) if rest else each.values
        sums += [found[i : i + len(vectors)] for i in range(0, len(found), len(vectors))]
    to = code.at(given.result(code, state), begin, dtype.itemsize)
    for (first, count), lanes_ in zip(vectors, zip(*sums, strict=True), strict=True):
        value = code.halved(FLOATS, [*lanes_])  # in the order of `tree`
        value = value if count == LANES else code.pick(FLOATS, value, range(count))
        numbers.store(code, value, to, first, count, dtype)
