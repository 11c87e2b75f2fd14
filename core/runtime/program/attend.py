"""Causal attention of rows over the KV cache, with grouped heads, windows, sinks and soft caps.

Keys are taken in blocks of BLOCK by their position, so that it does not matter how much of the cache is allocated, nor
where a prompt was cut. Of a query head, over the blocks in order, with m the greatest score so far, at first the sink:
    s = score(q . k * scale) of each key; m' = max(m, s...); c = exp(m - m')
    w = exp(s - m'); weights = weights * c, then lane (position mod 8) + w; out = out * c, then fma(w, v, out), by key
and finally out / total(weights). A sink counts as a weight of 1 in lane 0 at first. Where m' is -inf, 0 stands for it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from core.runtime.program.exp import exp, tanh
from core.runtime.program.vectors import (
    FLOATS,
    INTS,
    LANES,
    WIDTH,
    ZERO,
    code_address,
    everywhere,
    fields,
    fma,
    kernel_code,
    larger,
    load,
    number,
    op,
    pieces,
    store,
    total,
)
from core.system.native.ir import Code, fp32, splat, vector

FIELDS = (
    "q",
    "k",
    "v",
    "out",
    "sinks",
    "positions",
    "rows",
    "window",
    "k_head_stride",
    "k_row_stride",
    "v_head_stride",
    "v_row_stride",
)
INTEGERS = FIELDS[6:]
NO_WINDOW = 1 << 62
BLOCK = 64  # keys
SPAN = 64  # numbers of a head that are multiplied in one turn of a loop
# Heads that share what is loaded of keys and values, with how many keys and vectors of values are taken at a time: two
# of eight partial sums have to be in flight for each of two units that multiply, and sixteen registers hold them.
KEYS = {1: 8, 2: 4, 3: 4, 4: 2}
VECTORS = {1: 8, 2: 4, 3: 4, 4: 2}
HEADS = max(KEYS)
NONE = fp32(float("-inf"))


@dataclass(frozen=True)
class Attend:
    """Queries and keys have `width` numbers a head, values `values`. A score is scaled, then softcap * tanh(score /
    softcap) where there is a cap. `sinks`: each query head has a further score, without a value."""

    query_heads: int
    heads: int
    width: int
    values: int
    cache: torch.dtype
    scale: float
    softcap: float = 0.0
    sinks: bool = False

    def __post_init__(self) -> None:
        assert self.query_heads % self.heads == 0

    @property
    def group(self) -> int:
        return self.query_heads // self.heads


@functools.cache
def kernel(spec: Attend) -> int:
    """The address of the kernel. Unit head * rows + row is the queries of a row that read a head of keys. q [rows,
    query_heads, width] and out [rows, query_heads, values], fp32; sinks [query_heads], fp32. The row at p =
    positions[row], i64, reads positions max(0, p - window + 1) to p; head h of position p lies at k + h *
    k_head_stride + p * k_row_stride bytes, in the cache's type."""
    code, group = kernel_code("attend"), spec.group
    scores = code.let(f"alloca [{HEADS * BLOCK * 4} x i8], align {WIDTH}")
    halves = code.let(f"alloca [{LANES // 2 * HEADS * WIDTH} x i8], align {WIDTH}")
    most = code.let(f"alloca [{group * 4} x i8], align {WIDTH}")
    weights = code.let(f"alloca [{group * WIDTH} x i8], align {WIDTH}")
    at = fields(code, FIELDS, INTEGERS)
    with code.loop("%from", "%to") as unit:
        head, row = (code.let(f"{name} i64 {unit.index}, {at['rows']}") for name in ("udiv", "urem"))
        first = code.add(code.times(row, spec.query_heads), code.times(head, group))
        q, out = code.at(at["q"], first, spec.width * 4), code.at(at["out"], first, spec.values * 4)
        k, v = (code.at(at[name], code.times(head, at[f"{name}_head_stride"])) for name in "kv")
        sinks = code.at(at["sinks"], code.times(head, group), 4)
        position = code.load("i64", code.at(at["positions"], row, 8), 8)
        begin = _larger(code, code.let(f"sub i64 {code.add(position, 1)}, {at['window']}"), "0")
        end = code.add(position, 1)
        with code.loop(0, group) as each:
            begun = code.load("float", code.at(sinks, each.index, 4), 4) if spec.sinks else NONE
            code.store("float", begun, code.at(most, each.index, 4), 4)
            weight = vector("float", [fp32(float(spec.sinks and not lane)) for lane in range(LANES)])
            code.store(FLOATS, weight, code.at(weights, each.index, WIDTH), WIDTH)
            for start, count in pieces(spec.values):
                store(code, ZERO, code.at(out, each.index, spec.values * 4), start, count, torch.float32)
        with code.loop(code.let(f"and i64 {begin}, {-BLOCK}"), end, BLOCK) as block:
            low, high = _larger(code, begin, block.index), _smaller(code, end, code.add(block.index, BLOCK))
            for heads, start, stop in _shares(group):
                with code.loop(start, stop, heads) as share:
                    some = _Share(
                        spec,
                        code,
                        heads,
                        block.index,
                        (low, high),
                        code.at(q, share.index, spec.width * 4),
                        (k, v),
                        (at["k_row_stride"], at["v_row_stride"]),
                        code.at(out, share.index, spec.values * 4),
                        scores,
                        halves,
                    )
                    greatest, sums = code.at(most, share.index, 4), code.at(weights, share.index, WIDTH)
                    some.add_values(some.weigh(some.score(), greatest, sums))
        with code.loop(0, group) as each:
            sum_ = total(code, code.load(FLOATS, code.at(weights, each.index, WIDTH), WIDTH))
            divisor, into = everywhere(code, sum_), code.at(out, each.index, spec.values * 4)
            for start, count in pieces(spec.values):
                value = op(code, "fdiv", load(code, into, start, count, torch.float32), divisor)
                store(code, value, into, start, count, torch.float32)
    return code_address(code)


def _shares(group: int) -> list[tuple[int, int, int]]:
    """(heads, first, end): at most HEADS of a group at a time, as evenly as it goes."""
    shares = -(-group // HEADS)
    size, more = divmod(group, shares)
    ends = [(size + 1, 0, more * (size + 1))] if more else []
    return [*ends, (size, more * (size + 1), group)]


def _larger(code: Code, one: str, other: str) -> str:
    return code.call("i64", "llvm.smax.i64", ("i64", one), ("i64", other))


def _smaller(code: Code, one: str, other: str) -> str:
    return code.call("i64", "llvm.smin.i64", ("i64", one), ("i64", other))


@dataclass(frozen=True)
class _Share:
    """Some query heads of a row over the keys `reach` of the block that begins at position `block`."""

    spec: Attend
    code: Code
    heads: int
    block: str
    reach: tuple[str, str]
    q: str
    cached: tuple[str, str]
    strides: tuple[str, str]
    out: str
    scores: str  # room for [heads, BLOCK], fp32
    halves: str  # room for [LANES / 2, heads] vectors

    def score(self) -> list[str]:
        """Write the scores of the block, those out of reach as -inf -> of each head the greatest ones, by lane."""
        code, (low, high) = self.code, self.reach
        ends = [
            code.broadcast("i32", code.let(f"trunc i64 {code.let(f'sub i64 {end}, {self.block}')} to i32"), LANES)
            for end in self.reach
        ]
        begin, none = code.let(f"and i64 {low}, {-LANES}"), splat("float", LANES, NONE)
        with code.loop(begin, high, LANES, [(FLOATS, none)] * self.heads) as eight:
            first = code.let(f"sub i64 {eight.index}, {self.block}")
            start = code.broadcast("i32", code.let(f"trunc i64 {first} to i32"), LANES)
            places = code.let(f"add {INTS} {start}, {vector('i32', range(LANES))}")
            inside = code.let(
                f"and <{LANES} x i1> {code.let(f'icmp sge {INTS} {places}, {ends[0]}')}, "
                f"{code.let(f'icmp slt {INTS} {places}, {ends[1]}')}"
            )
            greatest = []
            for head, (found, before) in enumerate(zip(self._dots(eight.index), eight.values, strict=True)):
                value = op(code, "fmul", found, number(self.spec.scale))
                if cap := self.spec.softcap:
                    value = op(code, "fmul", tanh(code, op(code, "fdiv", value, number(cap))), number(cap))
                value = code.let(f"select <{LANES} x i1> {inside}, {FLOATS} {value}, {FLOATS} {none}")
                code.store(FLOATS, value, self._score(head, first), WIDTH)
                greatest.append(larger(code, value, before))
            eight.next = greatest
        return eight.values

    def weigh(self, greatest: list[str], most: str, weights: str) -> list[str]:
        """Turn the scores into weights, given each head's greatest score and sums of weights by lane so far, which are
        brought up to date -> what each head's output so far is to be multiplied by, in every lane."""
        code, kind = self.code, f"<{self.heads} x float>"
        now = "poison"
        for head, value in enumerate(greatest):
            for half in (4, 2, 1):
                of = f"<{2 * half} x float>"
                value = larger(code, *(code.pick(of, value, range(i, i + half)) for i in (0, half)), half)
            one = code.let(f"extractelement <1 x float> {value}, i32 0")
            now = code.let(f"insertelement {kind} {now}, float {one}, i32 {head}")
        before = code.load(kind, most, 4)
        now = larger(code, now, before, self.heads)
        code.store(kind, now, most, 4)
        nothing = code.let(f"fcmp oeq {kind} {now}, {splat('float', self.heads, NONE)}")
        now = code.let(f"select <{self.heads} x i1> {nothing}, {kind} {ZERO}, {kind} {now}")
        less = exp(code, op(code, "fsub", before, now, self.heads), self.heads)
        factors, maxima = ([code.pick(kind, of, [head] * LANES) for head in range(self.heads)] for of in (less, now))
        sums = [code.load(FLOATS, code.at(weights, head * WIDTH), WIDTH) for head in range(self.heads)]
        sums = [op(code, "fmul", one, factor) for one, factor in zip(sums, factors, strict=True)]
        begin = code.let(f"and i64 {self.reach[0]}, {-LANES}")
        with code.loop(begin, self.reach[1], LANES, [(FLOATS, one) for one in sums]) as eight:
            first, after = code.let(f"sub i64 {eight.index}, {self.block}"), []
            for head, (one, most_) in enumerate(zip(eight.values, maxima, strict=True)):
                place = self._score(head, first)
                weight = exp(code, op(code, "fsub", code.load(FLOATS, place, WIDTH), most_))
                code.store(FLOATS, weight, place, WIDTH)
                after.append(op(code, "fadd", one, weight))
            eight.next = after
        for head, one in enumerate(eight.values):
            code.store(FLOATS, one, code.at(weights, head * WIDTH), WIDTH)
        return factors

    def add_values(self, factors: list[str]) -> None:
        """Multiply the outputs so far, and add the values by their weights."""
        whole = self.spec.values - self.spec.values % LANES
        at_once = VECTORS[self.heads] * LANES
        full = whole - whole % at_once
        if full:
            with self.code.loop(0, full, at_once) as some:
                self._add(factors, some.index, [(i, LANES) for i in range(0, at_once, LANES)])
        if rest := [(first - full, count) for first, count in pieces(self.spec.values) if first >= full]:
            self._add(factors, str(full), rest)

    def _add(self, factors: list[str], start: str, vectors: list[tuple[int, int]]) -> None:
        """The same for some vectors (first, count) of values, counted from `start`."""
        code, values = self.code, self.spec.values
        out, v = code.at(self.out, start, 4), code.at(self.cached[1], start, self.spec.cache.itemsize)
        pairs = [(head, one) for head in range(self.heads) for one in vectors]
        begun = []
        for head, (first, count) in pairs:
            so_far = load(code, out, head * values + first, count, torch.float32)
            begun.append((FLOATS, op(code, "fmul", so_far, factors[head])))
        with code.loop(*self.reach, 1, begun) as key:
            row = code.at(v, code.times(key.index, self.strides[1]))
            place = code.let(f"sub i64 {key.index}, {self.block}")
            given = {one: load(code, row, one[0], one[1], self.spec.cache) for one in vectors}
            held = [everywhere(code, code.load("float", self._score(head, place), 4)) for head in range(self.heads)]
            key.next = [
                fma(code, held[head], given[one], before) for (head, one), before in zip(pairs, key.values, strict=True)
            ]
        for (head, (first, count)), value in zip(pairs, key.values, strict=True):
            store(code, value, out, head * values + first, count, torch.float32)

    def _score(self, head: int, place: str) -> str:
        return self.code.at(self.code.at(self.scores, head * BLOCK * 4), place, 4)

    def _dots(self, first: str) -> list[str]:
        """Of each head the products with eight keys from the `first` on, by lane."""
        code, (low, high), at_once = self.code, self.reach, KEYS[self.heads] // 2
        with code.loop(0, LANES // 2, at_once) as pair:
            keys = []
            for i in range(at_once):
                for place in (i, i + LANES // 2):
                    key = code.add(code.add(first, pair.index), place)
                    key = _smaller(code, _larger(code, key, low), code.add(high, -1))  # the others may not be memory
                    keys.append(code.at(self.cached[0], code.times(key, self.strides[0])))
            sums, into = self._sums(keys), code.at(self.halves, pair.index, self.heads * WIDTH)
            for i in range(at_once):
                for head in range(self.heads):
                    of = 2 * (head * at_once + i)
                    place = code.at(into, (i * self.heads + head) * WIDTH)
                    code.store(FLOATS, self._halved(*sums[of : of + 2]), place, WIDTH)
        return [
            self._lanes(
                [
                    code.load(FLOATS, code.at(self.halves, (i * self.heads + head) * WIDTH), WIDTH)
                    for i in range(LANES // 2)
                ]
            )
            for head in range(self.heads)
        ]

    def _sums(self, keys: list[str]) -> list[str]:
        """The partial sums of each head with each key."""
        code, width = self.code, self.spec.width
        sums = [ZERO] * (self.heads * len(keys))

        def add(first: str | int, count: int, sums: list[str]) -> list[str]:
            seen = [load(code, key, first, count, self.spec.cache) for key in keys]
            after = []
            for head in range(self.heads):
                query = load(code, code.at(self.q, head * width * 4), first, count, torch.float32)
                after += [fma(code, query, one, sums[head * len(keys) + i]) for i, one in enumerate(seen)]
            return after

        full = width - width % SPAN if width > SPAN else 0
        if full:
            with code.loop(0, full, SPAN, [(FLOATS, one) for one in sums]) as each:
                values = each.values
                for first in range(0, SPAN, LANES):
                    values = add(code.add(each.index, first), LANES, values)
                each.next = values
            sums = each.values
        for first, count in pieces(width):
            if first >= full:
                sums = add(first, count, sums)
        return sums

    def _halved(self, one: str, other: str) -> str:
        """p0..p3 of two keys: lanes i and i + 4 added."""
        low, high = (
            self.code.pick(FLOATS, one, [start + i for start in (at, at + LANES) for i in range(4)], other)
            for at in (0, 4)
        )
        return op(self.code, "fadd", low, high)

    def _lanes(self, halved: list[str]) -> str:
        """(p0 + p2) + (p1 + p3) of keys 0 and 4, 1 and 5, 2 and 6, 3 and 7, in the order of keys."""
        code = self.code
        quarters = []
        for one, other in (halved[:2], halved[2:]):  # p0 + p2, p1 + p3 of one, and of the other: in each half
            low, high = (
                code.pick(FLOATS, one, [at, at + 1, at + 8, at + 9, at + 4, at + 5, at + 12, at + 13], other)
                for at in (0, 2)
            )
            quarters.append(op(code, "fadd", low, high))
        low, high = (
            code.pick(FLOATS, quarters[0], [at, at + 2, at + 8, at + 10, at + 4, at + 6, at + 12, at + 14], quarters[1])
            for at in (0, 1)
        )
        return op(code, "fadd", low, high)
