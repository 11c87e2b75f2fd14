"""A block of keys and values for some queries that share what is read of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from core.runtime.program.exp import exp, tanh
from core.runtime.program.vectors import FLOATS, INTS, LANES, WIDTH, ZERO, Kernel, number, pieces
from core.system.native.ir import fp32, splat, vector

BLOCK = 64  # keys
LINE = 64  # bytes that are fetched together
SPAN = 64  # numbers of a head that are multiplied in one turn of a loop
# How many keys, and vectors of values, are taken at a time by so many queries: two units that multiply take four cycles
# for each product, so that eight sums have to be under way, and sixteen registers hold them and what is multiplied.
KEYS = {1: 8, 2: 4, 3: 4, 4: 2}
VECTORS = {1: 8, 2: 4, 3: 4, 4: 2}
QUERIES = max(KEYS)
NONE = fp32(float("-inf"))


@dataclass(frozen=True)
class Attend:
    """Queries and keys have `width` numbers a head, values `values`. A score is scaled, then softcap * tanh(score /
    softcap) where there is a cap. `sinks`: each query head has a further score, without a value. `ring`:
    position p is where p mod ring would be; 0 = where p is. `more`: further numbers of queries, and of keys, where
    those of a position are the same for all heads."""

    query_heads: int
    heads: int
    width: int
    values: int
    cache: torch.dtype
    scale: float
    softcap: float = 0.0
    sinks: bool = False
    ring: int = 0
    more: int = 0

    def __post_init__(self) -> None:
        assert self.query_heads % self.heads == 0 and self.ring % BLOCK == 0
        assert not (self.more and self.ring)

    @property
    def group(self) -> int:
        return self.query_heads // self.heads

    @property
    def query_bytes(self) -> int:
        return (self.width + self.more) * 4


@dataclass(frozen=True)
class Room:
    """Addresses of memory on the stack."""

    scores: str  # [QUERIES, BLOCK], fp32
    halves: str  # [LANES / 2, QUERIES] vectors

    @staticmethod
    def on_stack(code: Kernel) -> Room:
        sizes = QUERIES * BLOCK * 4, QUERIES * LANES // 2 * WIDTH
        return Room(*(code.stack(size) for size in sizes))


@dataclass(frozen=True)
class Share:
    """Queries that read the keys `reach` of the block that begins at position `block`. Query i is head places[i] of
    those at `q` and `out`."""

    code: Kernel
    spec: Attend
    room: Room
    places: Sequence[int]
    q: str
    out: str
    block: str
    reach: tuple[str, str]
    end: str  # of the keys that are read in all
    cached: tuple[str, str, str]  # the addresses of position 0 of keys, of values, and of the part of keys in common
    strides: tuple[str, str, str]  # bytes from one position to the next

    def attend(self, most: str, weights: str) -> None:
        """Add the block to the outputs, given the addresses of each query's greatest score and sums of weights."""
        self._add_values(self._weigh(self._score(), most, weights))

    @property
    def queries(self) -> int:
        return len(self.places)

    def _score(self) -> list[str]:
        """Write the scores of the block, those out of reach as -inf -> of each query the greatest ones, by lane."""
        code, (low, high) = self.code, self.reach
        ends = [
            code.broadcast("i32", code.let(f"trunc i64 {code.let(f'sub i64 {end}, {self.block}')} to i32"), LANES)
            for end in self.reach
        ]
        begin, none = code.let(f"and i64 {low}, {-LANES}"), splat("float", LANES, NONE)
        with code.loop(begin, high, LANES, [(FLOATS, none)] * self.queries) as eight:
            first = code.let(f"sub i64 {eight.index}, {self.block}")
            start = code.broadcast("i32", code.let(f"trunc i64 {first} to i32"), LANES)
            places = code.let(f"add {INTS} {start}, {vector('i32', range(LANES))}")
            inside = code.let(
                f"and <{LANES} x i1> {code.let(f'icmp sge {INTS} {places}, {ends[0]}')}, "
                f"{code.let(f'icmp slt {INTS} {places}, {ends[1]}')}"
            )
            self._fetch(eight.index)
            greatest = []
            for query, (found, before) in enumerate(zip(self._dots(eight.index), eight.values, strict=True)):
                value = code.op("fmul", found, number(self.spec.scale))
                if cap := self.spec.softcap:
                    value = code.op("fmul", tanh(code, code.op("fdiv", value, number(cap))), number(cap))
                value = code.let(f"select <{LANES} x i1> {inside}, {FLOATS} {value}, {FLOATS} {none}")
                code.store(FLOATS, value, self._place(query, first), WIDTH)
                greatest.append(code.larger(value, before))
            eight.next = greatest
        return eight.values

    def _fetch(self, first: str) -> None:
        """Have eight values from the `first` on, and eight keys of the next block, in the cache when they are read."""
        code, last = self.code, self.code.add(self.end, -1)
        widths = self.spec.width, self.spec.values, self.spec.more
        sizes = [width * self.spec.cache.itemsize for width in widths]
        for of, ahead in ((1, 0), (0, BLOCK), (2, BLOCK)):
            if not sizes[of]:
                continue
            for key in range(LANES):
                place = code.least(code.add(first, ahead + key), last)
                row = code.at(self.cached[of], code.times(place, self.strides[of]))
                for byte in range(0, sizes[of], LINE):
                    code.prefetch(code.at(row, byte))

    def _weigh(self, greatest: list[str], most: str, weights: str) -> list[str]:
        """Turn the scores into weights, given each query's greatest score and sums of weights by lane so far, which are
        brought up to date -> what each output so far is to be multiplied by, in every lane."""
        code, kind = self.code, f"<{self.queries} x float>"
        now = "poison"
        for query, value in enumerate(greatest):
            one = code.largest(value)
            now = code.let(f"insertelement {kind} {now}, float {one}, i32 {query}")
        before = code.load(kind, most, 4)
        now = code.larger(now, before, self.queries)
        code.store(kind, now, most, 4)
        nothing = code.let(f"fcmp oeq {kind} {now}, {splat('float', self.queries, NONE)}")
        now = code.let(f"select <{self.queries} x i1> {nothing}, {kind} {ZERO}, {kind} {now}")
        less = exp(code, code.op("fsub", before, now, self.queries), self.queries)
        factors, maxima = (
            [code.pick(kind, of, [query] * LANES) for query in range(self.queries)] for of in (less, now)
        )
        sums = [code.load(FLOATS, code.at(weights, query * WIDTH), WIDTH) for query in range(self.queries)]
        sums = [code.op("fmul", one, factor) for one, factor in zip(sums, factors, strict=True)]
        begin = code.let(f"and i64 {self.reach[0]}, {-LANES}")
        with code.loop(begin, self.reach[1], LANES, [(FLOATS, one) for one in sums]) as eight:
            first, after = code.let(f"sub i64 {eight.index}, {self.block}"), []
            for query, (one, most_) in enumerate(zip(eight.values, maxima, strict=True)):
                place = self._place(query, first)
                weight = exp(code, code.op("fsub", code.load(FLOATS, place, WIDTH), most_))
                code.store(FLOATS, weight, place, WIDTH)
                after.append(code.op("fadd", one, weight))
            eight.next = after
        for query, one in enumerate(eight.values):
            code.store(FLOATS, one, code.at(weights, query * WIDTH), WIDTH)
        return factors

    def _add_values(self, factors: list[str]) -> None:
        """Multiply the outputs so far, and add the values by their weights."""
        for some in self.code.over(self.spec.values, size=VECTORS[self.queries] * LANES):
            self._add(factors, some.first, some.pieces)

    def _add(self, factors: list[str], start: str | int, vectors: list[tuple[int, int]]) -> None:
        """The same for some vectors (first, count) of values, counted from `start`."""
        code, values = self.code, self.spec.values
        out, v = code.at(self.out, start, 4), code.at(self.cached[1], start, self.spec.cache.itemsize)
        pairs = [(query, one) for query in range(self.queries) for one in vectors]
        begun = []
        for query, (first, count) in pairs:
            so_far = code.read(out, self.places[query] * values + first, count, torch.float32)
            begun.append((FLOATS, code.op("fmul", so_far, factors[query])))
        with code.loop(*self.reach, 1, begun) as key:
            row = code.at(v, code.times(key.index, self.strides[1]))
            place = code.let(f"sub i64 {key.index}, {self.block}")
            given = {one: code.read(row, one[0], one[1], self.spec.cache) for one in vectors}
            held = [code.everywhere(code.load("float", self._place(query, place), 4)) for query in range(self.queries)]
            key.next = [
                code.fma(held[query], given[one], before)
                for (query, one), before in zip(pairs, key.values, strict=True)
            ]
        for (query, (first, count)), value in zip(pairs, key.values, strict=True):
            code.write(value, out, self.places[query] * values + first, count, torch.float32)

    def _place(self, query: int, place: str) -> str:
        return self.code.at(self.code.at(self.room.scores, query * BLOCK * 4), place, 4)

    def _dots(self, first: str) -> list[str]:
        """Of each query the products with eight keys from the `first` on, by lane."""
        code, (low, high), at_once = self.code, self.reach, KEYS[self.queries] // 2
        with code.loop(0, LANES // 2, at_once) as pair:
            keys = []
            for i in range(at_once):
                for after in (i, i + LANES // 2):
                    key = code.add(code.add(first, pair.index), after)
                    keys.append(code.least(code.most(key, low), code.add(high, -1)))  # others may be no memory
            sums, into = self._sums(keys), code.at(self.room.halves, pair.index, self.queries * WIDTH)
            for i in range(at_once):
                for query in range(self.queries):
                    of = 2 * (query * at_once + i)
                    place = code.at(into, (i * self.queries + query) * WIDTH)
                    code.store(FLOATS, self._halved(*sums[of : of + 2]), place, WIDTH)
        return [
            self._lanes(
                [
                    code.load(FLOATS, code.at(self.room.halves, (i * self.queries + query) * WIDTH), WIDTH)
                    for i in range(LANES // 2)
                ]
            )
            for query in range(self.queries)
        ]

    def _sums(self, keys: list[str]) -> list[str]:
        """The partial sums of each query with the keys of some positions."""
        sums = [ZERO] * (self.queries * len(keys))
        for of, start, width in ((0, 0, self.spec.width), (2, self.spec.width, self.spec.more)):
            if width:
                at = [self.code.at(self.cached[of], self.code.times(key, self.strides[of])) for key in keys]
                sums = self._added(at, start, width, sums)
        return sums

    def _added(self, keys: list[str], start: int, width: int, sums: list[str]) -> list[str]:
        """The sums after `width` numbers of each key, by number `start` of a query and those after it."""
        code, whole = self.code, self.spec.width + self.spec.more

        def add(first: str | int, count: int, sums: list[str]) -> list[str]:
            seen = [code.read(key, first, count, self.spec.cache) for key in keys]
            after = []
            for query in range(self.queries):
                begin = code.at(self.q, (self.places[query] * whole + start) * 4)
                given = code.read(begin, first, count, torch.float32)
                after += [code.fma(given, one, sums[query * len(keys) + i]) for i, one in enumerate(seen)]
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
        return self.code.op("fadd", low, high)

    def _lanes(self, halved: list[str]) -> str:
        """(p0 + p2) + (p1 + p3) of keys 0 and 4, 1 and 5, 2 and 6, 3 and 7, in the order of keys."""
        code = self.code
        quarters = []
        for one, other in (halved[:2], halved[2:]):  # p0 + p2, p1 + p3 of one, and of the other: in each half
            low, high = (
                code.pick(FLOATS, one, [at, at + 1, at + 8, at + 9, at + 4, at + 5, at + 12, at + 13], other)
                for at in (0, 2)
            )
            quarters.append(code.op("fadd", low, high))
        low, high = (
            code.pick(FLOATS, quarters[0], [at, at + 2, at + 8, at + 10, at + 4, at + 6, at + 12, at + 14], quarters[1])
            for at in (0, 1)
        )
        return code.op("fadd", low, high)
