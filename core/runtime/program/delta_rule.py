"""The gated delta rule: states of a sequence that rows read and change, one after the other.

The state of a value head is a matrix s [key_width, value_width]. Of a row with the normed query q and key k of the head
that it reads, their product p, value v, a decay and a rate, and for each column:
    a = sum(k[i] * s[i]); b = sum(q[i] * s[i]), by fma from 0, in the order of i
    d = fma(-decay, a, v) * rate; out = fma(d, p, decay * b); s[i] = fma(k[i], d, decay * s[i])
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from core.runtime.program.vectors import (
    FLOATS,
    WIDTH,
    ZERO,
    code_address,
    everywhere,
    fields,
    fma,
    kernel_code,
    load,
    op,
    pieces,
    store,
    where,
)
from core.system.native.ir import Code

FIELDS = ("mixed", "products", "decays", "rates", "state", "out", "rows")
FP32 = torch.float32
SLICE = 32  # columns that are taken at a time: eight sums are under way, and the state of so many fits the first cache
BLOCK = 8  # rows of the state that are taken at a time where it is read once: so that memory is read in its order
UNROLLED = 4


@dataclass(frozen=True)
class DeltaRule:
    """Of value heads, of which as many read each key head."""

    key_heads: int
    key_width: int
    value_heads: int
    value_width: int

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
    rates [rows, value_heads]; state [value_heads, key_width, value_width] is brought up to date; out [rows,
    value_heads, value_width]. All are fp32."""
    code = kernel_code("delta_rule")
    room = code.let(f"alloca [{spec.key_width * min(SLICE, spec.value_width) * 4} x i8], align {WIDTH}")
    sums = [code.let(f"alloca [{len(pieces(spec.value_width)) * WIDTH} x i8], align {WIDTH}") for _ in "ab"]
    at = fields(code, FIELDS, ("rows",))
    once = code.let(f"icmp eq i64 {at['rows']}, 1")
    several = code.let(f"xor i1 {once}, true")
    with code.loop("%from", "%to") as unit:
        state = code.at(at["state"], unit.index, spec.key_width * spec.value_width * 4)
        head = _Head(spec, code, at, unit.index, state, room, sums)
        with where(code, once):
            head.compute_one()
        with where(code, several):
            head.compute_rows()
    return code_address(code)


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
    code: Code
    at: dict[str, str]
    head: str
    state: str
    room: str
    sums: list[str]

    def compute_one(self) -> None:
        """Compute a single row on the state where it is."""
        code, row = self.code, self._row("0")
        for first, count in pieces(self.spec.value_width):
            for one in self.sums:
                store(code, ZERO, one, first, count, FP32)

        def add(begin: str, count: int) -> None:
            def some(first: str, part: _Part) -> None:
                places = [code.at(one, first, 4) for one in self.sums]
                values = [load(code, place, *vector, FP32) for place in places for vector in part.vectors]
                for i in range(count):
                    values = self._added(row, part, code.add(begin, i), values)
                for value, (place, vector) in zip(values, ((p, v) for p in places for v in part.vectors), strict=True):
                    store(code, value, place, *vector, FP32)

            self._slices(some)

        self._blocks(add)

        def finish(first: str, part: _Part) -> None:
            places = [code.at(one, first, 4) for one in self.sums]
            values = [load(code, place, *vector, FP32) for place in places for vector in part.vectors]
            for vector, d in zip(part.vectors, self._finished(row, part, first, values), strict=True):
                store(code, d, places[0], *vector, FP32)

        self._slices(finish)

        def change(begin: str, count: int) -> None:
            def some(first: str, part: _Part) -> None:
                ds = [load(code, code.at(self.sums[0], first, 4), *vector, FP32) for vector in part.vectors]
                for i in range(count):
                    self._change(row, part, code.add(begin, i), ds)

            self._slices(some)

        self._blocks(change)

    def compute_rows(self) -> None:
        """Compute all rows by slices of columns, whose state is copied."""
        self._slices(self._compute_slice)

    def _compute_slice(self, first: str, part: _Part) -> None:
        code, width = self.code, sum(count for _, count in part.vectors)
        kept = _Part(part.vectors, self.room, width * 4)
        self._copy(part, kept)
        with code.loop(0, self.at["rows"]) as each:
            row = self._row(each.index)
            values = self._finished(row, kept, first, self._all_added(row, kept))
            self._unrolled(lambda i: self._change(row, kept, i, values))
        self._copy(kept, part)

    def _slices(self, body: Callable[[str, _Part], None]) -> None:
        """body(first column, the part that begins there) of all columns."""
        code, width = self.code, self.spec.value_width
        whole = width - width % SLICE
        if whole:
            with code.loop(0, whole, SLICE) as some:
                body(some.index, _Part(pieces(SLICE), code.at(self.state, some.index, 4), width * 4))
        if whole < width:
            body(str(whole), _Part(pieces(width - whole), code.at(self.state, whole, 4), width * 4))

    def _blocks(self, body: Callable[[str, int], None]) -> None:
        """body(first row, count) of all rows of the state."""
        width = self.spec.key_width
        whole = width - width % BLOCK
        with self.code.loop(0, whole, BLOCK) as some:
            body(some.index, BLOCK)
        if whole < width:
            body(str(whole), width - whole)

    def _unrolled(self, body: Callable[[str], None]) -> None:
        """body(row) of all rows of the state."""
        width = self.spec.key_width
        whole = width - width % UNROLLED
        with self.code.loop(0, whole, UNROLLED) as some:
            for i in range(UNROLLED):
                body(self.code.add(some.index, i))
        for last in range(whole, width):
            body(str(last))

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
        return everywhere(code, code.load("float", at, 4))

    def _copy(self, part: _Part, to: _Part) -> None:
        code = self.code
        with code.loop(0, self.spec.key_width) as i:
            line, into = (code.at(one.state, i.index, one.stride) for one in (part, to))
            for vector in part.vectors:
                store(code, load(code, line, *vector, FP32), into, *vector, FP32)

    def _all_added(self, row: _Row, part: _Part) -> list[str]:
        """The sums over keys of each vector, and then those over queries."""
        sums, width = [ZERO] * (2 * len(part.vectors)), self.spec.key_width
        whole = width - width % UNROLLED
        with self.code.loop(0, whole, UNROLLED, [(FLOATS, one) for one in sums]) as some:
            values = some.values
            for i in range(UNROLLED):
                values = self._added(row, part, self.code.add(some.index, i), values)
            some.next = values
        sums = some.values
        for last in range(whole, width):
            sums = self._added(row, part, str(last), sums)
        return sums

    def _added(self, row: _Row, part: _Part, i: str, sums: list[str]) -> list[str]:
        """These sums with a row of the state more."""
        code, count = self.code, len(part.vectors)
        factors = [everywhere(code, code.load("float", code.at(of, i, 4), 4)) for of in (row.k, row.q)]
        line = code.at(part.state, i, part.stride)
        state = [load(code, line, *vector, FP32) for vector in part.vectors]
        return [fma(code, factors[n // count], state[n % count], so_far) for n, so_far in enumerate(sums)]

    def _finished(self, row: _Row, part: _Part, begin: str, sums: list[str]) -> list[str]:
        """Write the output of the columns from `begin` on -> how far each value is off, times the rate."""
        code, ds = self.code, list[str]()
        less, half = code.let(f"fneg {FLOATS} {row.decay}"), len(part.vectors)
        v, out = (code.at(of, begin, 4) for of in (row.v, row.out))
        for vector, a, b in zip(part.vectors, sums[:half], sums[half:], strict=True):
            d = op(code, "fmul", fma(code, less, a, load(code, v, *vector, FP32)), row.rate)
            store(code, fma(code, d, row.product, op(code, "fmul", row.decay, b)), out, *vector, FP32)
            ds.append(d)
        return ds

    def _change(self, row: _Row, part: _Part, i: str, ds: list[str]) -> None:
        """Bring a row of the state up to date."""
        code = self.code
        factor = everywhere(code, code.load("float", code.at(row.k, i, 4), 4))
        line = code.at(part.state, i, part.stride)
        for vector, d in zip(part.vectors, ds, strict=True):
            value = fma(code, factor, d, op(code, "fmul", row.decay, load(code, line, *vector, FP32)))
            store(code, value, line, *vector, FP32)
