"""Eight rows of codes at a time times several rows of x, as LLVM instructions: codes are read and unpacked once for all
rows of x, into the processor's cache, and no bit of a result differs from `core.memory.codec.fast.rows`.

Unpacked, four codes of each of eight rows lie side by side, for the inputs whose integers of x are four consecutive
bytes: one multiplication gives eight outputs.
"""

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
from core.memory.codec.fast.layout import LANES, LINE, VECTOR, Blocks, meaning
from core.memory.codec.fast.rows import FLOATS, Given, group_numbers
from core.memory.codec.fast.shares import Step, slots_of
from core.memory.codec.matrix import Matrix, Part
from core.system.native import numbers
from core.system.native.ir import Code, fp32, splat

SIDES = 2  # vectors of eight rows that a tile multiplies at once
STATES = (4, 1)  # rows of x that it multiplies at once


def serves(matrix: Matrix, blocks: Blocks) -> bool:
    """Whether blocks fill whole vectors in each slot, and rows whole tiles."""
    share = Blocks(matrix.share)
    return not (matrix.outputs % LANES or share.count % blocks.unit or share.size != blocks.size)


def unpack(name: str, matrix: Matrix, blocks: Blocks) -> Code:
    """Generates the function name(slot, into, first, block): what a slot has of eight rows of the matrix from the
    `first` on, and which of their blocks is the first there."""
    return _Unpacking(name, matrix, blocks).code


def multiply(code: Code, unpack: str, matrix: Matrix, blocks: Blocks, out: torch.dtype, given: Given) -> None:
    """Append: rows %from..%to - 1 of the matrix in %slot, a multiple of LANES, times the prepared rows of x. `unpack`
    is the name of that function; nothing is unpacked where there are none."""
    _Tiles(code, unpack, matrix, blocks, out, given)


class _Unpacked:
    """Where the parts of eight rows lie, once unpacked."""

    def __init__(self, matrix: Matrix, blocks: Blocks) -> None:
        self.block = LANES * blocks.size  # bytes of a block's codes
        self.codes = 0
        self.scales = blocks.count * self.block
        self.zeros = self.scales + (blocks.count * VECTOR if matrix.group else 0)
        self.bytes = self.zeros + (blocks.count * VECTOR if matrix.zero is not None else 0)

    def at(self, code: Code, rows: str, key: str, block: str) -> str:
        """The address of a block's codes, scales or zeros of the eight unpacked `rows`."""
        size = self.block if key == "codes" else VECTOR
        return code.at(code.at(rows, getattr(self, key)), block, size)


def _place(blocks: Blocks, shift: int, dword: int) -> int:
    """Number of a vector within a block's unpacked codes: those of a shift one after the other."""
    return shift * (blocks.size // blocks.low.per_byte // 4) + dword


class _Unpacking:
    def __init__(self, name: str, matrix: Matrix, blocks: Blocks) -> None:
        self.code = code = Code(f"void @{name}(ptr noalias %slot, ptr noalias %into, i64 %first, i64 %block)")
        self._unpacked = _Unpacked(matrix, blocks)
        self._matrix, self._blocks, self._meaning = matrix.share, Blocks(matrix.share), meaning(matrix)
        begin = code.at("%into", "%block", self._unpacked.block)
        with code.loop(0, self._blocks.count // blocks.unit) as each:
            self._codes(each.index, code.at(begin, each.index, blocks.unit * self._unpacked.block))
        if matrix.group:
            assert matrix.scale is not None
            self._numbers(self._unpacked.scales, matrix.scale)
        if matrix.zero is not None:
            self._numbers(self._unpacked.zeros, matrix.zero)

    def _codes(self, unit: str, into: str) -> None:
        code, blocks = self.code, self._blocks
        bits, per_byte = blocks.low.bits, blocks.low.per_byte
        size, block_bytes = blocks.unit * blocks.size * bits // 8, blocks.size * bits // 8  # of a unit, of a block
        begins = []
        for plane in blocks.planes:
            stride = self._matrix.inputs * plane.bits // 8
            begin = code.at(code.at("%slot", plane.at), "%first", stride)
            begins.append((code.at(begin, unit, blocks.share(plane, size)), stride, blocks.share(plane, VECTOR)))

        def row(r: int, i: int) -> list[str]:
            raw = []
            for begin, stride, count in begins:
                one = code.load(f"<{count} x i8>", code.at(begin, r * stride + i * count))
                raw.append(spread(code, one, count))
            return integers(code, self._meaning, raw)

        for i in range(size // VECTOR):
            shifted = [row(r, i) for r in range(LANES)]
            for shift in range(per_byte):
                dwords = [code.let(f"bitcast {BYTES} {one[shift]} to {INTS}") for one in shifted]
                for d, value in enumerate(transposed(code, INTS, dwords)):
                    block, within = divmod(i * VECTOR + 4 * d, block_bytes)
                    place = block * self._unpacked.block + _place(blocks, shift, within // 4) * VECTOR
                    code.store(INTS, value, code.at(into, place), VECTOR)

    def _numbers(self, offset: int, part: Part) -> None:
        """Scales or zeros: those of a block side by side, in fp32."""
        code, blocks = self.code, self._blocks
        into = code.at(code.at("%into", offset), "%block", VECTOR)

        def step(index: str, count: int) -> None:
            some = Step(index, count, "%slot", index)
            rows = [
                group_numbers(code, self._matrix, blocks, [], part, code.add("%first", r), some) for r in range(LANES)
            ]
            at = code.at(into, index, LANES * VECTOR)
            for b, value in enumerate(transposed(code, FLOATS, rows)[:count]):
                code.store(FLOATS, value, code.at(at, b * VECTOR), VECTOR)

        with code.loop(0, blocks.count // LANES) as each:
            step(each.index, LANES)
        if rest := blocks.count % LANES:
            step(str(blocks.count // LANES), rest)


class _Tiles:
    def __init__(self, code: Code, unpack: str, matrix: Matrix, blocks: Blocks, out: torch.dtype, given: Given) -> None:
        self.code, self._given = code, given
        self._matrix, self._blocks, self._out, self._meaning = matrix, blocks, out, meaning(matrix)
        self._unpacked, self._slots = _Unpacked(matrix, blocks), slots_of(code, matrix)
        self._rows = [code.stack(self._unpacked.bytes) for _ in range(SIDES)]
        self._kept = {
            key: code.stack(LANES * SIDES * STATES[0] * VECTOR)
            for key in ("sums", "zeros")
            if key == "sums" or matrix.zero is not None
        }
        some = code.let(f"icmp sgt i64 {given.count}, 0")
        end = code.let(f"select i1 {some}, i64 %to, i64 %from")
        last = code.add("%to", -LANES)
        with code.loop("%from", end, SIDES * LANES) as each:
            firsts = [code.least(code.add(each.index, side * LANES), last) for side in range(SIDES)]
            for first, rows in zip(firsts, self._rows, strict=True):
                for i, slot in enumerate(self._slots):
                    block = i * (blocks.count // matrix.blocks)
                    code.do(f"call void @{unpack}(ptr {slot}, ptr {rows}, i64 {first}, i64 {block})")
            done = "0"
            for states in STATES:
                left = code.let(f"sub i64 {given.count}, {done}")
                until = code.add(done, code.whole(left, states))
                with code.loop(done, until, states) as state:
                    self._tile(firsts, [code.add(state.index, s) for s in range(states)])
                done = until

    def _tile(self, firsts: list[str], states: list[str]) -> None:
        """The outputs of the rows from each of `firsts` on for these rows of x. Where eight are left they come twice:
        their results are written again."""
        code, blocks = self.code, self._blocks
        unit = blocks.unit
        x = [self._given.row(code, state, blocks.bytes) for state in states]
        for at in self._kept.values():
            for i in range(LANES * SIDES * len(states)):
                code.store(FLOATS, "zeroinitializer", code.at(at, i * VECTOR), VECTOR)
        ahead = self._ahead(firsts, states)
        with code.loop(0, blocks.count // unit) as each:
            for begin, lines in ahead:
                for line in range(lines):
                    code.prefetch(code.at(code.at(begin, each.index, lines * LINE), line * LINE), 2)
            for b in range(unit):
                block = code.add(code.times(each.index, unit), b)
                self._block(x, each.index, b, block)
        for side, first in enumerate(firsts):
            for s, state in enumerate(states):
                self._write(side, (s, len(states)), first, state)

    def _ahead(self, firsts: list[str], states: list[str]) -> list[tuple[str, int]]:
        """(address, lines of it for each unit) of the rows that are unpacked once these are multiplied, to be fetched
        while the first rows of x are: those after them fetch what is in the cache."""
        code, blocks = self.code, self._blocks
        if len(states) < STATES[0] or len(self._slots) > 1:
            return []
        is_first, found = code.let(f"icmp eq i64 {states[0]}, 0"), []
        for plane in blocks.planes:
            size = blocks.unit * blocks.size * plane.bits // 8
            stride = self._matrix.inputs * plane.bits // 8
            rows = code.at(code.at("%slot", plane.at), code.add(firsts[0], SIDES * LANES), stride)
            begin = code.let(f"select i1 {is_first}, ptr {rows}, ptr {self._rows[0]}")
            found.append((begin, max(1, SIDES * LANES * size // LINE)))
        return found

    def _block(self, x: list[str], unit: str, b: int, block: str) -> None:
        """Add the terms of one block to the accumulators that it belongs to."""
        code, blocks, matrix = self.code, self._blocks, self._matrix
        lane = code.let(f"and i64 {block}, {LANES - 1}")
        found = self._integers(x, unit, b, block)
        for s, own in enumerate(x):
            offset = ""
            if self._meaning.offset:
                total = code.load("i32", code.at(code.at(own, blocks.sums), block, 4), 4)
                offset = code.broadcast("i32", code.let(f"mul i32 {total}, {self._meaning.offset}"), LANES)
            step = code.broadcast("float", code.load("float", code.at(code.at(own, blocks.scales), block, 4), 4), LANES)
            for side in range(SIDES):
                value = found[side, s]
                if offset:
                    value = code.let(f"sub {INTS} {value}, {offset}")
                by = step
                if matrix.group:
                    by = code.let(f"fmul {FLOATS} {self._numbers('scales', side, block)}, {step}")
                self._add("sums", lane, side, (s, len(x)), code.let(f"sitofp {INTS} {value} to {FLOATS}"), by)
                if matrix.zero is not None:
                    scaled = code.load("float", code.at(code.at(own, blocks.scaled_sums), block, 4), 4)
                    scaled = code.broadcast("float", scaled, LANES)
                    self._add("zeros", lane, side, (s, len(x)), self._numbers("zeros", side, block), scaled)

    def _numbers(self, key: str, side: int, block: str) -> str:
        return self.code.load(FLOATS, self._unpacked.at(self.code, self._rows[side], key, block), VECTOR)

    def _add(self, key: str, lane: str, side: int, state: tuple[int, int], a: str, b: str) -> None:
        """`state`: which of how many."""
        code, (s, states) = self.code, state
        at = code.at(code.at(self._kept[key], lane, SIDES * states * VECTOR), (side * states + s) * VECTOR)
        before = code.load(FLOATS, at, VECTOR)
        code.store(FLOATS, code.fma(a, b, before), at, VECTOR)

    def _integers(self, x: list[str], unit: str, b: int, block: str) -> dict[tuple[int, int], str]:
        """<8 x i32> for each side and row of x: the sums of one block's products."""
        code, blocks, meant = self.code, self._blocks, self._meaning
        limit, per_byte = added_in_16_bits(meant), blocks.low.per_byte
        keys = [(side, s) for side in range(SIDES) for s in range(len(x))]
        short, total, held = dict.fromkeys(keys, ""), dict.fromkeys(keys, ""), 0
        begin = [code.at(code.at(own, blocks.numbers), unit, blocks.unit * blocks.size) for own in x]
        codes = [self._unpacked.at(code, rows, "codes", block) for rows in self._rows]
        places = [(shift, d) for shift in range(per_byte) for d in range(blocks.size // per_byte // 4)]
        for n, (shift, d) in enumerate(places):
            held_codes = []
            for side in range(SIDES):
                raw = code.load(BYTES, code.at(codes[side], _place(blocks, shift, d) * VECTOR), VECTOR)
                held_codes.append((raw, magnitudes(code, meant, raw)))
            first = b * blocks.size * blocks.low.bits // 8 + 4 * d  # byte of codes within the unit
            offset = (first // VECTOR * per_byte + shift) * VECTOR + first % VECTOR
            held += 1
            for s, own in enumerate(begin):
                four = code.load("i32", code.at(own, offset), 4)
                given = code.let(f"bitcast {INTS} {code.broadcast('i32', four, LANES)} to {BYTES}")
                for side in range(SIDES):
                    product = pairs(code, meant, *held_codes[side], given)
                    key = side, s
                    short[key] = code.let(f"add {SHORTS} {short[key]}, {product}") if held > 1 else product
                    if held == limit or n == len(places) - 1:
                        wide = widened(code, short[key])
                        total[key] = code.let(f"add {INTS} {total[key]}, {wide}") if total[key] else wide
            if held == limit:
                held = 0
        return total

    def _write(self, side: int, which: tuple[int, int], row: str, state: str) -> None:
        """Eight outputs for one row of x, `which` of how many."""
        code, matrix, out, (s, states) = self.code, self._matrix, self._out, which
        sums = []
        for lane in range(LANES):
            at = (lane * SIDES * states + side * states + s) * VECTOR
            total = code.load(FLOATS, code.at(self._kept["sums"], at), VECTOR)
            if matrix.zero is not None:
                zeros = code.load(FLOATS, code.at(self._kept["zeros"], at), VECTOR)
                total = code.let(f"fadd {FLOATS} {total}, {zeros}")
            sums.append(total)
        y = code.halved(FLOATS, sums)
        if self._meaning.factor != 1.0:
            y = code.let(f"fmul {FLOATS} {y}, {splat('float', LANES, fp32(self._meaning.factor))}")
        if by_row := matrix.row_scale:
            scale = numbers.load(code, code.at(self._slots[0], by_row.at), row, LANES, by_row.dtype)
            y = code.let(f"fmul {FLOATS} {y}, {scale}")
        numbers.store(code, y, self._given.result(code, state), row, LANES, out)


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
