"""A row of codes times one row of x, as LLVM instructions: codes are read once, at the speed of memory."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from core.memory.codec.fast.integers import (
    BYTES,
    INTS,
    SHORTS,
    added_in_16_bits,
    integers,
    magnitudes,
    pairs,
    spread,
    widened,
)
from core.memory.codec.fast.layout import LANES, VECTOR, Blocks, Plane, meaning
from core.memory.codec.fast.shares import Step, slots_of
from core.memory.codec.matrix import Matrix, Part
from core.system.native import numbers
from core.system.native.ir import Code, fp32, splat

AT_ONCE = 2  # rows of the matrix
AHEAD = 2048  # bytes prefetched ahead in each
FLOATS = "<8 x float>"
ZERO = "zeroinitializer"


@dataclass(frozen=True, slots=True)
class Given:
    """Which rows of x are multiplied, and where results go: names of values in a kernel."""

    x: str  # address of prepared rows
    index: str  # address of the numbers (i64) of those that are multiplied
    count: str
    into: str  # address of the results of the first one
    out_row: str  # bytes between those of one and the next

    def row(self, code: Code, at: str, size: int) -> str:
        """The address of row number `at` of those that are multiplied; a prepared row has `size` bytes."""
        return code.at(self.x, code.load("i64", code.at(self.index, at, 8), 8), size)

    def result(self, code: Code, at: str) -> str:
        """The address of its results."""
        return code.at(self.into, code.let(f"mul i64 {at}, {self.out_row}"))


def apart(code: Code, first: str, last: str, count: int) -> Iterator[list[str]]:
    """Loops over the rows first..last - 1 of a matrix, `count` at once, each from a range of its own: processors fetch
    several streams of consecutive bytes faster than one, or than rows beside each other. What is left comes alone."""
    distance = code.let(f"udiv i64 {code.let(f'sub i64 {last}, {first}')}, {count}")
    with code.loop(first, code.add(first, distance)) as each:
        yield [code.add(each.index, code.times(distance, i) if i else 0) for i in range(count)]
    with code.loop(code.add(first, code.times(distance, count)), last) as each:
        yield [each.index]


def multiply(code: Code, matrix: Matrix, blocks: Blocks, out: torch.dtype, given: Given) -> None:
    """Append: rows %from..%to - 1 of the matrix in %slot times the given rows of x."""
    slots = slots_of(code, matrix)
    for rows in apart(code, "%from", "%to", AT_ONCE):
        with code.loop(0, given.count) as state:
            found = _Rows(code, matrix, blocks, slots, given.row(code, state.index, blocks.bytes), rows).sums()
            for row, sums in zip(rows, found, strict=True):
                _write(code, matrix, slots[0], sums, row, given.result(code, state.index), out)


def _write(code: Code, matrix: Matrix, slot: str, sums: str, row: str, into: str, out: torch.dtype) -> None:
    """The tree over eight sums, scaled and rounded, into `into`[row]."""
    y = tree(code, sums)
    factor = meaning(matrix).factor
    if factor != 1.0:
        y = code.let(f"fmul float {y}, {fp32(factor)}")
    if by_row := matrix.row_scale:
        scale = numbers.load(code, code.at(slot, by_row.at), row, 1, by_row.dtype)
        y = code.let(f"fmul float {y}, {code.first(scale)}")
    numbers.store_one(code, y, into, row, out)


def tree(code: Code, sums: str) -> str:
    """p[j] = A[j] + A[j + 4]; (p[0] + p[2]) + (p[1] + p[3])."""
    for size in (8, 4, 2):
        kind = f"<{size} x float>"
        low, high = (code.pick(kind, sums, range(at, at + size // 2)) for at in (0, size // 2))
        sums = code.let(f"fadd <{size // 2} x float> {low}, {high}")
    return code.first(sums)


class _Rows:
    """The sums of rows of codes, for each of the LANES accumulators."""

    def __init__(self, code: Code, matrix: Matrix, blocks: Blocks, slots: list[str], x: str, rows: list[str]) -> None:
        """`x`: address of the prepared row of x."""
        self._code, self._matrix, self._blocks, self._meaning = code, matrix, blocks, meaning(matrix)
        self._slots, self._x, self._rows = slots, x, rows
        self._each = 1 if matrix.zero is None else 2  # sums of a row

    def sums(self) -> list[str]:
        """<8 x float> of each row, before the tree."""
        code, blocks, values = self._code, self._blocks, [ZERO] * (self._each * len(self._rows))
        each, rest = divmod(blocks.count // len(self._slots), LANES)  # whole steps in a slot
        done = 0
        if not rest or len(self._slots) == 1:
            for slot in self._slots:
                with code.loop(0, each, 1, [(FLOATS, value) for value in values]) as loop:
                    loop.next = self._steps(Step(code.add(loop.index, done), LANES, slot, loop.index), loop.values)
                values, done = loop.values, done + each
        for number in range(done, blocks.steps):
            values = self._steps(Step(number, min(LANES, blocks.count - number * LANES)), values)
        if self._each == 1:
            return values
        return [code.let(f"fadd {FLOATS} {a}, {b}") for a, b in zip(values[::2], values[1::2], strict=True)]

    def _steps(self, step: Step, totals: list[str]) -> list[str]:
        """Add the terms of a step of each row."""
        found = list[str]()
        for row in self._rows:
            found += self._step(row, step, totals[len(found) : len(found) + self._each])
        return found

    def _step(self, row: str, step: Step, totals: list[str]) -> list[str]:
        """Those of one row."""
        code, matrix, blocks = self._code, self._matrix, self._blocks
        whole = self._codes(row, step)
        if self._meaning.offset:
            sums = code.load(INTS, code.at(code.at(self._x, blocks.sums), step.number, LANES * 4), 4)
            off = code.let(f"mul {INTS} {sums}, {splat('i32', LANES, self._meaning.offset)}")
            whole = code.let(f"sub {INTS} {whole}, {off}")
        value = code.let(f"sitofp {INTS} {whole} to {FLOATS}")
        by = code.load(FLOATS, code.at(code.at(self._x, blocks.scales), step.number, LANES * 4), 4)
        if matrix.group:
            assert matrix.scale is not None
            by = code.let(f"fmul {FLOATS} {self._groups(row, step, matrix.scale)}, {by}")
        after = [code.fma(value, by, totals[0])]
        if matrix.zero is not None:
            scaled = code.load(FLOATS, code.at(code.at(self._x, blocks.scaled_sums), step.number, LANES * 4), 4)
            after.append(code.fma(self._groups(row, step, matrix.zero), scaled, totals[1]))
        return after

    def _groups(self, row: str, step: Step, part: Part) -> str:
        return group_numbers(self._code, self._matrix, self._blocks, self._slots, part, row, step)

    def _codes(self, row: str, step: Step) -> str:
        """<8 x i32>: the sums of LANES blocks' products."""
        code, blocks = self._code, self._blocks
        size, per_byte = blocks.size * blocks.low.bits // 8, blocks.low.per_byte  # bytes of a block
        x = code.at(code.at(self._x, blocks.numbers), step.number, LANES * blocks.size)
        begins: dict[tuple[str, Plane], str] = {}
        found: list[str] = []
        for i in range(blocks.vectors):
            left = min(VECTOR, step.blocks * size - i * VECTOR)
            if left <= 0:
                found.append(ZERO)
                continue
            raw = [self._raw(row, step, plane, i, left, begins) for plane in blocks.planes]
            found.append(self._products(raw, code.at(x, i * per_byte * VECTOR)))
        return reduced(code, found, added_in_16_bits(self._meaning) // per_byte)

    def _raw(self, row: str, step: Step, plane: Plane, i: int, left: int, begins: dict[tuple[str, Plane], str]) -> str:
        """What a plane has of vector `i` of codes, of which `left` bytes are there. `begins`: where the step begins."""
        code, blocks, own = self._code, self._blocks, self._matrix.own * plane.bits // 8  # bytes of a row
        every, some = LANES * blocks.size * plane.bits // 8, blocks.share(plane, VECTOR)
        raw = list[tuple[str, int]]()
        for slot, at, first, count in step.spans(self._slots, i * some, blocks.share(plane, left), every, own):
            if (slot, plane) not in begins:
                begins[slot, plane] = code.at(code.at(code.at(slot, plane.at), row, own), at, every)
            begin = begins[slot, plane]
            if first % VECTOR == 0 or count == VECTOR:  # a line is fetched once, or twice
                code.prefetch(code.at(begin, AHEAD + first))
            raw.append((code.load(f"<{count} x i8>", code.at(begin, first)), count))
        return spread(code, code.joined("i8", raw, some), some)

    def _products(self, raw: list[str], x: str) -> str:
        """A vector of codes times its integers of x: sums of 16 bits where these hold all, else <8 x i32>."""
        code, meant, per_byte = self._code, self._meaning, self._blocks.low.per_byte
        limit, total, short, held = added_in_16_bits(meant), "", "", 0
        for shift, one in enumerate(integers(code, meant, raw)):
            given = code.load(BYTES, code.at(x, shift * VECTOR))
            product = pairs(code, meant, one, magnitudes(code, meant, one), given)
            short = code.let(f"add {SHORTS} {short}, {product}") if held else product
            held += 1
            if per_byte <= limit:
                total = short
            elif held == limit or shift == per_byte - 1:
                wide = widened(code, short)
                total = code.let(f"add {INTS} {total}, {wide}") if total else wide
                held = 0
        return total


def group_numbers(
    code: Code, matrix: Matrix, blocks: Blocks, slots: list[str], part: Part, row: str, step: Step
) -> str:
    """Of a row: the scales or zeros of LANES blocks in fp32; 0 for those beyond a step's."""
    spread, own = matrix.group // blocks.size, matrix.own // matrix.group  # blocks of a group, groups of a row
    groups = -(-step.blocks // spread)
    found = list[tuple[str, int]]()
    for slot, at, first, count in step.spans(slots, 0, groups, LANES // spread, own):
        begin = code.add(code.add(code.times(row, own), code.times(at, LANES // spread) if at else 0), first)
        found.append((numbers.load(code, code.at(slot, part.at), begin, count, part.dtype), count))
    values = code.joined("float", found, groups)
    if matrix.wide:
        assert groups == LANES and step.slot  # a step has the blocks of one slot, and of `wide` inputs
        return code.let(f"fmul {FLOATS} {values}, {_shared(code, matrix, blocks, part, row, step)}")
    if groups == LANES:
        return values
    places = [i // spread if i < step.blocks else groups for i in range(LANES)]
    return code.pick(f"<{groups} x float>", values, places, ZERO)


def _shared(code: Code, matrix: Matrix, blocks: Blocks, part: Part, row: str, step: Step) -> str:
    """What all scales or zeros of a step are multiplied by, in every lane."""
    assert matrix.row is not None
    each = 1 if matrix.zero is None else 2
    number = code.let(f"udiv i64 {step.own}, {matrix.wide // (LANES * blocks.size)}")
    at = code.add(code.times(row, matrix.own // matrix.wide * each), code.times(number, each))
    at = code.add(at, int(part == matrix.zero))
    one = numbers.load(code, code.at(step.slot, matrix.row.at), at, 1, matrix.row.dtype)
    return code.broadcast("float", code.first(one), LANES)


WHOLE = [*range(LANES)], [*range(LANES, 2 * LANES)]
ADDED = {  # which 32 bits of two vectors, by whether the second and the third are of the first one's block
    (True, True): ([0, 8, 1, 9, 4, 12, 5, 13], [2, 10, 3, 11, 6, 14, 7, 15]),
    (False, True): ([0, 1, 8, 9, 4, 5, 12, 13], [2, 3, 10, 11, 6, 7, 14, 15]),
    (True, False): ([0, 2, 8, 10, 4, 6, 12, 14], [1, 3, 9, 11, 5, 7, 13, 15]),
    (False, False): ([0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]),
}


def reduced(code: Code, vectors: list[str], room: int) -> str:
    """Vectors of sums, in which those of each of LANES blocks are consecutive, to one of a 32-bit sum for each. They
    have 16 bits, which hold the sum of `room` of them, or 32 where that is 0."""
    count = len(vectors)
    labels = [[(i * LANES + j) // count for j in range(LANES)] for i in range(count)]  # blocks of each 32 bits
    while room > 1 and len(vectors) > 1:
        vectors, labels = _halved(code, SHORTS, vectors, labels)
        room //= 2
    if room:
        vectors = [widened(code, one) for one in vectors]
    while len(vectors) > 1:
        vectors, labels = _halved(code, INTS, vectors, labels)
    places = [labels[0].index(block) for block in range(LANES)]
    return vectors[0] if places == sorted(places) else code.pick(INTS, vectors[0], places)


def _halved(code: Code, kind: str, vectors: list[str], labels: list[list[int]]) -> tuple[list[str], list[list[int]]]:
    """Half as many vectors: neighbours, added."""
    after, named = [], []
    for i in range(0, len(vectors), 2):
        own, both = labels[i], labels[i] + labels[i + 1]
        low, high = ADDED[own[1] == own[0], own[2] == own[0]] if own != labels[i + 1] else WHOLE
        one, other = (code.let(f"bitcast {kind} {vector} to {INTS}") for vector in vectors[i : i + 2])
        one, other = (
            code.let(f"bitcast {INTS} {code.pick(INTS, one, places, other)} to {kind}") for places in (low, high)
        )
        after.append(code.let(f"add {kind} {one}, {other}"))
        named.append([both[at] for at in low])
    return after, named
