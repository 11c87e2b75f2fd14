"""The gated delta rule: states of a sequence that rows read and change, one after the other.

The state of a value head is a matrix s [key_width, value_width]. Of a row with the normed query q and key k of the head
that it reads, their product p, value v, a decay and a rate, and for each column:
    a = sum(k[i] * s[i]); b = sum(q[i] * s[i]), by fma from 0, in the order of i
    d = fma(-decay, a, v) * rate; out = fma(d, p, decay * b); s[i] = fma(k[i], d, decay * s[i])
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from core.runtime.program.vectors import FLOATS, WIDTH, ZERO, Kernel, pieces

FIELDS = ("mixed", "products", "decays", "rates", "state", "out", "rows")
FP32 = torch.float32
SLICE = 32  # columns that are taken at a time: eight sums are under way, and the state of so many fits the first cache
BLOCK = 8  # rows of the state that are taken at a time where it is read once: so that memory is read in its order
UNROLLED = 4


@dataclass(frozen=True)
class DeltaRule:
    """Of value heads, of which as many read each key head. `holds`: the states stay as they are."""

    key_heads: int
    key_width: int
    value_heads: int
    value_width: int
    holds: bool = False

    def __post_init__(self) -> None:
        assert self.value_heads % self.key_heads == 0

    @property
    def channels(self) -> int:
        """Numbers of a row of queries, keys and values."""
        return 2 * self.key_heads * self.key_width + self.value_heads * self.value_width


@functools.cache
def kernel(spec: DeltaRule) -> int:
    """The address of the kernel. A unit is a value head, of all rows in order. mixed [rows, spec.channels]: queries and
    keys, [key_heads, key_width] each, then values [value_heads, value_width]; products [rows, key_heads]; decays and
    rates [rows, value_heads]; state [value_heads, key_width, value_width] is brought up to date unless it `holds`; out
    [rows, value_heads, value_width]. All are fp32."""
    code = Kernel("delta_rule")
    room = code.stack(spec.key_width * min(SLICE, spec.value_width) * 4)
    sums = [code.stack(len(pieces(spec.value_width)) * WIDTH) for _ in "ab"]
    at = code.fields(FIELDS, ("rows",))
    once = code.let(f"icmp eq i64 {at['rows']}, 1")
    several = "true" if spec.holds else code.let(f"xor i1 {once}, true")
    with code.loop("%from", "%to") as unit:
        state = code.at(at["state"], unit.index, spec.key_width * spec.value_width * 4)
        head = _Head(spec, code, at, unit.index, state, room, sums)
        if not spec.holds:
            with code.where(once):
                head.compute_one()
        with code.where(several):
            head.compute_rows()
    return code.address()


@dataclass(frozen=True)
class _Row:
    """The addresses of a row's numbers of a head, and its numbers in every lane."""

    q: str
    k: str
    v: str
    out: str
    product: str
    decay: str
    rate: str


@dataclass(frozen=True)
class _Part:
    """Vectors (first, count) of a state's columns, and where the state is, `stride` bytes from one row to the next."""

    vectors: list[tuple[int, int]]
    state: str
    stride: int


@dataclass(frozen=True)
class _Head:
    """A value head: its state, memory for a slice of it, and for the two sums of each column."""

    spec: DeltaRule
    code: Kernel
    at: dict[str, str]
    head: str
    state: str
    room: str
    sums: list[str]

    def compute_one(self) -> None:
        """Compute a single row on the state where it is."""
        code, row = self.code, self._row("0")
        for begin, count in pieces(self.spec.value_width):
            for one in self.sums:
                code.write(ZERO, one, begin, count, FP32)
        for rows in code.over(self.spec.key_width, size=BLOCK):
            for first, part in self._slices():
                places = [code.at(one, first, 4) for one in self.sums]
                values = [code.read(place, *vector, FP32) for place in places for vector in part.vectors]
                for i in range(rows.count):
                    values = self._added(row, part, code.add(rows.first, i), values)
                for value, (place, vector) in zip(values, ((p, v) for p in places for v in part.vectors), strict=True):
                    code.write(value, place, *vector, FP32)
        for first, part in self._slices():
            places = [code.at(one, first, 4) for one in self.sums]
            values = [code.read(place, *vector, FP32) for place in places for vector in part.vectors]
            for vector, d in zip(part.vectors, self._finished(row, part, first, values), strict=True):
                code.write(d, places[0], *vector, FP32)
        for rows in code.over(self.spec.key_width, size=BLOCK):
            for first, part in self._slices():
                ds = [code.read(code.at(self.sums[0], first, 4), *vector, FP32) for vector in part.vectors]
                for i in range(rows.count):
                    self._change(row, part, code.add(rows.first, i), ds)

    def compute_rows(self) -> None:
        """Compute all rows by slices of columns, whose state is copied."""
        code, width = self.code, self.spec.key_width
        for first, part in self._slices():
            kept = _Part(part.vectors, self.room, sum(count for _, count in part.vectors) * 4)
            self._copy(part, kept)
            with code.loop(0, self.at["rows"]) as each:
                row = self._row(each.index)
                for some in code.over(width, [ZERO] * (2 * len(part.vectors)), UNROLLED):
                    for i in range(some.count):
                        some.values = self._added(row, kept, code.add(some.first, i), some.values)
                values = self._finished(row, kept, first, some.values)
                for some in code.over(width, size=UNROLLED):
                    for i in range(some.count):
                        self._change(row, kept, code.add(some.first, i), values)
            if not self.spec.holds:
                self._copy(kept, part)

    def _slices(self) -> Iterator[tuple[str | int, _Part]]:
        """(first column, the part that begins there) of all columns."""
        width = self.spec.value_width
        for some in self.code.over(width, size=SLICE):
            yield some.first, _Part(some.pieces, self.code.at(self.state, some.first, 4), width * 4)

    def _row(self, row: str) -> _Row:
        code, spec = self.code, self.spec
        mixed = code.at(self.at["mixed"], row, spec.channels * 4)
        key_head = code.let(f"udiv i64 {self.head}, {spec.value_heads // spec.key_heads}")
        q = code.at(mixed, key_head, spec.key_width * 4)
        k = code.at(q, spec.key_heads * spec.key_width * 4)
        v = code.at(code.at(mixed, 2 * spec.key_heads * spec.key_width * 4), self.head, spec.value_width * 4)
        out = code.at(self.at["out"], code.add(code.times(row, spec.value_heads), self.head), spec.value_width * 4)
        product = self._number("products", row, spec.key_heads, key_head)
        decay, rate = (self._number(name, row, spec.value_heads, self.head) for name in ("decays", "rates"))
        return _Row(q, k, v, out, product, decay, rate)

    def _number(self, name: str, row: str, count: int, column: str) -> str:
        """A number of a table [rows, count], in every lane."""
        code = self.code
        at = code.at(code.at(self.at[name], row, count * 4), column, 4)
        return code.everywhere(code.load("float", at, 4))

    def _copy(self, part: _Part, to: _Part) -> None:
        code = self.code
        with code.loop(0, self.spec.key_width) as i:
            line, into = (code.at(one.state, i.index, one.stride) for one in (part, to))
            for vector in part.vectors:
                code.write(code.read(line, *vector, FP32), into, *vector, FP32)

    def _added(self, row: _Row, part: _Part, i: str, sums: list[str]) -> list[str]:
        """The sums over keys of each vector, and then those over queries, with a row of the state more."""
        code, count = self.code, len(part.vectors)
        factors = [code.spread(of, i) for of in (row.k, row.q)]
        line = code.at(part.state, i, part.stride)
        state = [code.read(line, *vector, FP32) for vector in part.vectors]
        return [code.fma(factors[n // count], state[n % count], so_far) for n, so_far in enumerate(sums)]

    def _finished(self, row: _Row, part: _Part, begin: str | int, sums: list[str]) -> list[str]:
        """Write the output of the columns from `begin` on -> how far each value is off, times the rate."""
        code, ds = self.code, list[str]()
        less, half = code.let(f"fneg {FLOATS} {row.decay}"), len(part.vectors)
        v, out = (code.at(of, begin, 4) for of in (row.v, row.out))
        for vector, a, b in zip(part.vectors, sums[:half], sums[half:], strict=True):
            d = code.op("fmul", code.fma(less, a, code.read(v, *vector, FP32)), row.rate)
            code.write(code.fma(d, row.product, code.op("fmul", row.decay, b)), out, *vector, FP32)
            ds.append(d)
        return ds

    def _change(self, row: _Row, part: _Part, i: str, ds: list[str]) -> None:
        """Bring a row of the state up to date."""
        code = self.code
        factor = code.spread(row.k, i)
        line = code.at(part.state, i, part.stride)
        for vector, d in zip(part.vectors, ds, strict=True):
            value = code.fma(factor, d, code.op("fmul", row.decay, code.read(line, *vector, FP32)))
            code.write(value, line, *vector, FP32)
