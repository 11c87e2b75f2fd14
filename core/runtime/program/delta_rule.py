"""The gated delta rule: states of a sequence that rows read and change, one after the other.

The state of a value head is a matrix s [key_width, value_width]. Of a row with the normed query q and key k of the head
that it reads, their product p, value v, a decay and a rate, and for each column:
    a = sum(k[i] * s[i]); b = sum(q[i] * s[i]), by fma from 0, in the order of i
    d = fma(-decay, a, v) * rate; out = fma(d, p, decay * b); s[i] = fma(k[i], d, decay * s[i])
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from core.runtime.program.vectors import (
    FLOATS,
    LANES,
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
SLICE = 32  # columns of a unit: eight sums are under way, and the state of so many stays in the first cache
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

    @property
    def slices(self) -> int:
        """Units of a head."""
        return -(-self.value_width // SLICE)

    @property
    def units(self) -> int:
        return self.value_heads * self.slices


@functools.cache
def kernel(spec: DeltaRule) -> int:
    """The address of the kernel. Unit head * spec.slices + i is slice i of a head's columns, of all rows in order.
    mixed [rows, spec.channels]: queries and keys, [key_heads, key_width] each, then values [value_heads, value_width];
    products [rows, key_heads]; decays and rates [rows, value_heads]; state [value_heads, key_width, value_width] is
    brought up to date; out [rows, value_heads, value_width]. All are fp32."""
    code, width = kernel_code("delta_rule"), min(SLICE, spec.value_width)
    kept = code.let(f"alloca [{spec.key_width * -(-width // LANES) * WIDTH} x i8], align {WIDTH}")
    at, whole = fields(code, FIELDS, ("rows",)), spec.value_width // SLICE
    with code.loop("%from", "%to") as unit:
        head, part = (code.let(f"{name} i64 {unit.index}, {spec.slices}") for name in ("udiv", "urem"))
        if whole:
            with where(code, code.let(f"icmp slt i64 {part}, {whole}")):
                _Slice(spec, code, at, head, code.times(part, SLICE), pieces(SLICE), kept).compute()
        if rest := spec.value_width - whole * SLICE:
            with where(code, code.let(f"icmp eq i64 {part}, {whole}")):
                _Slice(spec, code, at, head, str(whole * SLICE), pieces(rest), kept).compute()
    return code_address(code)


@dataclass(frozen=True)
class _Slice:
    """The columns from `first` on of a value head, as vectors (first, count)."""

    spec: DeltaRule
    code: Code
    at: dict[str, str]
    head: str
    first: str
    vectors: list[tuple[int, int]]
    kept: str  # memory for the state of these columns

    def compute(self) -> None:
        """Compute all rows."""
        code, spec = self.code, self.spec
        begin = code.add(code.times(self.head, spec.key_width * spec.value_width), self.first)
        state = code.at(self.at["state"], begin, 4)
        with code.loop(0, spec.key_width) as i:
            line, place = code.at(state, i.index, spec.value_width * 4), self._place(i.index)
            for j, (first, count) in enumerate(self.vectors):
                code.store(FLOATS, load(code, line, first, count, FP32), code.at(place, j * WIDTH), WIDTH)
        with code.loop(0, self.at["rows"]) as row:
            self._row(row.index)
        with code.loop(0, spec.key_width) as i:
            line, place = code.at(state, i.index, spec.value_width * 4), self._place(i.index)
            for j, (first, count) in enumerate(self.vectors):
                value = code.load(FLOATS, code.at(place, j * WIDTH), WIDTH)
                store(code, value, line, first, count, FP32)

    def _row(self, row: str) -> None:
        """Compute a row."""
        code, spec = self.code, self.spec
        mixed = code.at(self.at["mixed"], row, spec.channels * 4)
        key_head = code.let(f"udiv i64 {self.head}, {spec.value_heads // spec.key_heads}")
        q = code.at(mixed, key_head, spec.key_width * 4)
        k = code.at(q, spec.key_heads * spec.key_width * 4)
        column = code.add(code.times(self.head, spec.value_width), self.first)
        v = code.at(code.at(mixed, 2 * spec.key_heads * spec.key_width * 4), column, 4)
        out = code.at(code.at(self.at["out"], row, spec.value_heads * spec.value_width * 4), column, 4)
        product = self._number("products", row, spec.key_heads, key_head)
        decay, rate = (self._number(name, row, spec.value_heads, self.head) for name in ("decays", "rates"))
        a, b = self._sums(q, k)
        less, ds = code.let(f"fneg {FLOATS} {decay}"), []
        for (first, count), one, other in zip(self.vectors, a, b, strict=True):
            d = op(code, "fmul", fma(code, less, one, load(code, v, first, count, FP32)), rate)
            store(code, fma(code, d, product, op(code, "fmul", decay, other)), out, first, count, FP32)
            ds.append(d)
        self._change(k, decay, ds)

    def _sums(self, q: str, k: str) -> tuple[list[str], list[str]]:
        """The sums over keys and over queries, of each vector."""
        code, count = self.code, len(self.vectors)

        def add(i: str, sums: list[str]) -> list[str]:
            factors = [everywhere(code, code.load("float", code.at(of, i, 4), 4)) for of in (k, q)]
            place = self._place(i)
            state = [code.load(FLOATS, code.at(place, j * WIDTH), WIDTH) for j in range(count)]
            return [
                fma(code, factors[n // count], state[n % count], so_far)  # those over keys come first
                for n, so_far in enumerate(sums)
            ]

        sums = [ZERO] * (2 * count)
        whole = self.spec.key_width - self.spec.key_width % UNROLLED
        with code.loop(0, whole, UNROLLED, [(FLOATS, one) for one in sums]) as some:
            values = some.values
            for i in range(UNROLLED):
                values = add(code.add(some.index, i), values)
            some.next = values
        sums = some.values
        for last in range(whole, self.spec.key_width):
            sums = add(str(last), sums)
        return sums[:count], sums[count:]

    def _change(self, k: str, decay: str, ds: list[str]) -> None:
        """Bring the state up to date."""
        code = self.code

        def change(i: str) -> None:
            factor, place = everywhere(code, code.load("float", code.at(k, i, 4), 4)), self._place(i)
            for j, d in enumerate(ds):
                cell = code.at(place, j * WIDTH)
                value = fma(code, factor, d, op(code, "fmul", decay, code.load(FLOATS, cell, WIDTH)))
                code.store(FLOATS, value, cell, WIDTH)

        whole = self.spec.key_width - self.spec.key_width % UNROLLED
        with code.loop(0, whole, UNROLLED) as some:
            for i in range(UNROLLED):
                change(code.add(some.index, i))
        for last in range(whole, self.spec.key_width):
            change(str(last))

    def _place(self, i: str) -> str:
        """Where row i of the state is kept."""
        return self.code.at(self.kept, i, len(self.vectors) * WIDTH)

    def _number(self, name: str, row: str, count: int, column: str) -> str:
        """A number of a table [rows, count], in every lane."""
        code = self.code
        at = code.at(code.at(self.at[name], row, count * 4), column, 4)
        return everywhere(code, code.load("float", at, 4))
