"""Rows of plain numbers times rows of x, as LLVM instructions: several of each at once, whose sums do not mix."""

from __future__ import annotations

import torch

from core.memory.codec.fast.layout import LANES
from core.memory.codec.fast.rows import FLOATS, Given, apart, tree
from core.memory.codec.matrix import Matrix
from core.system.native import numbers
from core.system.native.ir import Code

TILES = ((2, 6), (3, 4), (3, 3), (4, 2), (4, 1))  # rows of the matrix and of x that are multiplied at once
KEPT = 128 << 10  # bytes of the matrix that stay in the cache while all rows of x pass
LINE = 64  # bytes


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
    begin = code.at("%slot", matrix.codes.at)
    kept = max(LANES, KEPT // (matrix.inputs * matrix.codes.dtype.itemsize) & -LANES)
    with code.loop("%from", "%to", kept) as some:
        last = code.call("i64", "llvm.smin.i64", ("i64", code.add(some.index, kept)), ("i64", "%to"))
        done = "0"
        for at_once, states in TILES:
            left = code.let(f"sub i64 {given.count}, {done}")
            until = code.add(done, code.times(code.let(f"udiv i64 {left}, {states}"), states))
            with code.loop(done, until, states) as state:
                for rows in apart(code, some.index, last, at_once):
                    _tile(code, matrix, begin, rows, given, (state.index, states), out)
            done = until


def _tile(
    code: Code,
    matrix: Matrix,
    begin: str,
    rows: list[str],
    given: Given,
    some_states: tuple[str, int],
    dtype: torch.dtype,
) -> None:
    """Rows of the matrix times (first, how many) rows of x."""
    state, states = some_states
    inputs, stored = matrix.inputs, matrix.codes.dtype
    weights = [code.at(begin, row, inputs * stored.itemsize) for row in rows]
    x = [given.row(code, code.add(state, s), padded(inputs) * 4) for s in range(states)]
    keys = [(r, s) for r in range(len(rows)) for s in range(states)]

    def step(at: str | int, count: int, totals: list[str]) -> list[str]:
        held = [_lanes(code, numbers.load(code, one, at, count, stored), count) for one in weights]
        after = dict(zip(keys, totals, strict=True))
        for s, one in enumerate(x):
            seen = _lanes(code, code.load(f"<{count} x float>", code.at(one, at, 4), 4), count)
            for r in range(len(rows)):
                after[r, s] = code.call(
                    FLOATS, "llvm.fma.v8f32", (FLOATS, held[r]), (FLOATS, seen), (FLOATS, after[r, s])
                )
        return list(after.values())

    wide = LINE // stored.itemsize
    with code.loop(0, inputs // wide, 1, [(FLOATS, "zeroinitializer")] * len(keys)) as each:
        totals = each.values
        for k in range(0, wide, LANES):
            totals = step(code.add(code.times(each.index, wide), k), LANES, totals)
        each.next = totals
    totals = each.values
    for at in range(inputs // wide * wide, inputs, LANES):
        totals = step(at, min(LANES, inputs - at), totals)
    for (r, s), total in zip(keys, totals, strict=True):
        one = code.let(f"insertelement <1 x float> poison, float {tree(code, total)}, i32 0")
        kind, value = numbers.rounded(code, one, 1, dtype)
        to = given.result(code, code.add(state, s))
        code.store(kind, value, code.at(to, rows[r], dtype.itemsize), dtype.itemsize)


def _multiply_columns(code: Code, matrix: Matrix, out: torch.dtype, given: Given) -> None:
    """The same of a matrix [inputs, outputs]: eight of its columns at a time, a vector of sums for each lane."""
    whole, rest = matrix.outputs // LANES * LANES, matrix.outputs % LANES
    last = code.call("i64", "llvm.smin.i64", ("i64", "%to"), ("i64", str(whole)))
    with code.loop("%from", last, LANES) as some, code.loop(0, given.count) as state:
        _columns(code, matrix, some.index, LANES, given, state.index, out)
    if rest:
        begin = code.call("i64", "llvm.smax.i64", ("i64", "%from"), ("i64", str(whole)))
        with code.loop(begin, "%to", LANES) as some, code.loop(0, given.count) as state:
            _columns(code, matrix, some.index, rest, given, state.index, out)


def _columns(code: Code, matrix: Matrix, first: str, count: int, given: Given, state: str, dtype: torch.dtype) -> None:
    """`count` columns from the `first` on times a row of x."""
    stored = matrix.codes.dtype
    weights = code.at(code.at("%slot", matrix.codes.at), first, stored.itemsize)
    x = given.row(code, state, padded(matrix.inputs) * 4)

    def step(at: str | int, count_: int, totals: list[str]) -> list[str]:
        after = list[str]()
        for lane, total in enumerate(totals):
            held = seen = "zeroinitializer"  # beyond the last input
            if lane < count_:
                place = code.add(at, lane) if isinstance(at, str) else at + lane
                row = code.at(weights, place, matrix.outputs * stored.itemsize)
                held = _lanes(code, numbers.load(code, row, 0, count, stored), count)
                seen = code.broadcast("float", code.load("float", code.at(x, place, 4), 4), LANES)
            after.append(code.call(FLOATS, "llvm.fma.v8f32", (FLOATS, held), (FLOATS, seen), (FLOATS, total)))
        return after

    with code.loop(0, matrix.inputs // LANES, 1, [(FLOATS, "zeroinitializer")] * LANES) as each:
        each.next = step(code.times(each.index, LANES), LANES, each.values)
    sums = each.values
    if rest := matrix.inputs % LANES:
        sums = step(matrix.inputs - rest, rest, sums)
    while len(sums) > 1:  # the order of `tree`
        half = len(sums) // 2
        sums = [code.let(f"fadd {FLOATS} {a}, {b}") for a, b in zip(sums[:half], sums[half:], strict=True)]
    value = sums[0] if count == LANES else code.pick(FLOATS, sums[0], range(count))
    kind, value = numbers.rounded(code, value, count, dtype)
    to = code.at(given.result(code, state), first, dtype.itemsize)
    code.store(kind, value, to, dtype.itemsize)


def _lanes(code: Code, value: str, count: int) -> str:
    """As many lanes as a sum has: 0 in those beyond `count`."""
    if count == LANES:
        return value
    return code.pick(f"<{count} x float>", value, [min(i, count) for i in range(LANES)], "zeroinitializer")
