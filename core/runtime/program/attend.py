"""Causal attention of rows over the KV cache, with grouped heads, windows, sinks and soft caps.

Keys are taken in blocks of BLOCK by their position, so that it does not matter how much of the cache is allocated, nor
where a prompt was cut. Of a query head, over the blocks in order, with m the greatest score so far, at first the sink:
    s = score(q . k * scale) of each key; m' = max(m, s...); c = exp(m - m')
    w = exp(s - m'); weights = weights * c, then lane (position mod 8) + w; out = out * c, then fma(w, v, out), by key
and finally out / total(weights). A sink counts as a weight of 1 in lane 0 at first. Where m' is -inf, 0 stands for it.
The part of keys that all heads share follows the one of each head in q . k, and begins again with lane 0.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from core.runtime.program.attend_block import BLOCK, NONE, QUERIES, Attend, Room, Share
from core.runtime.program.vectors import FLOATS, LANES, WIDTH, ZERO, Kernel, pieces
from core.system.native.ir import fp32, vector

STRIDES = ("k_head_stride", "k_row_stride", "v_head_stride", "v_row_stride", "more_row_stride")
INTEGERS = ("rows", "window", *STRIDES)
FIELDS = ("q", "k", "v", "out", "sinks", "positions", "more", *INTEGERS)
NO_WINDOW = 1 << 62
Reach = tuple[str, str]  # the keys begin..end - 1


@functools.cache
def kernel(spec: Attend) -> int:
    """The address of the kernel. Unit head * rows + row is the queries of a row that read a head of keys. q [rows,
    query_heads, width + more] and out [rows, query_heads, values], fp32; sinks [query_heads], fp32. The row at p =
    positions[row], i64, reads positions max(0, p - window + 1) to p; head h of position p lies at k + h *
    k_head_stride + p * k_row_stride bytes, in the cache's type; what heads share of it at more + p *
    more_row_stride."""
    code = Kernel("attend")
    together = max(1, QUERIES // spec.group)
    room, at = Room.on_stack(code), code.fields(FIELDS, INTEGERS)
    most = code.stack(together * spec.group * 4)
    weights = code.stack(together * spec.group * WIDTH)
    rows = code.most(at["rows"], "1")
    first_head = code.let(f"udiv i64 %from, {rows}")
    end_head = code.let(f"udiv i64 {code.add('%to', code.add(rows, -1))}, {rows}")
    with code.loop(first_head, end_head) as head:
        before = code.times(head.index, rows)
        start = code.most(code.let(f"sub i64 %from, {before}"), "0")
        end = code.least(code.let(f"sub i64 %to, {before}"), rows)
        with code.loop(start, end, together) as row:
            count = code.least(code.let(f"sub i64 {end}, {row.index}"), str(together))
            first = code.times(head.index, spec.group)
            query = code.add(code.times(row.index, spec.query_heads), first)
            tile = _Tile(
                spec,
                code,
                together,
                count,
                positions=code.at(at["positions"], row.index, 8),
                q=code.at(at["q"], query, spec.query_bytes),
                out=code.at(at["out"], query, spec.values * 4),
                sinks=code.at(at["sinks"], first, 4),
                window=at["window"],
                k=code.at(at["k"], code.times(head.index, at["k_head_stride"])),
                v=code.at(at["v"], code.times(head.index, at["v_head_stride"])),
                more=at["more"],
                strides=(at["k_row_stride"], at["v_row_stride"], at["more_row_stride"]),
                room=room,
                most=most,
                weights=weights,
            )
            tile.attend()
    return code.address()


@dataclass(frozen=True)
class _Tile:
    """The queries of `count` rows, at most `together`, that read a head of keys: what they read of a block is shared
    where it is the same for all of so many rows. Names are the addresses of the first row's fields."""

    spec: Attend
    code: Kernel
    together: int
    count: str
    positions: str
    q: str
    out: str
    sinks: str
    window: str
    k: str
    v: str
    more: str
    strides: tuple[str, str, str]  # bytes from one position to the next, of keys, values, and what heads share of keys
    room: Room
    most: str  # the greatest score of each query so far
    weights: str  # the sums of weights of each query so far, by lane

    def attend(self) -> None:
        code = self.code
        with code.loop(0, self.count) as row, code.loop(0, self.spec.group) as query:
            self._begin(row.index, query.index)
        last = code.add(self.count, -1)
        reaches = [self._reach(code.least(str(i), last)) for i in range(self.together)]
        first = functools.reduce(code.least, [begin for begin, _ in reaches])
        end = functools.reduce(code.most, [end for _, end in reaches])
        with code.loop(code.let(f"and i64 {first}, {-BLOCK}"), end, BLOCK) as block:
            tile = self._turned(block.index)
            if self.together == 1:
                tile._row("0", reaches[0], block.index)
            else:
                tile._rows(reaches, block.index)
        with code.loop(0, self.count) as row, code.loop(0, self.spec.group) as query:
            self._finish(row.index, query.index)

    def _turned(self, block: str) -> _Tile:
        """The same for a block that lies where its position mod `ring` would."""
        code, ring = self.code, self.spec.ring
        if not ring:
            return self
        before = code.let(f"sub i64 {code.let(f'urem i64 {block}, {ring}')}, {block}")
        k, v = (code.at(of, code.times(before, by)) for of, by in zip((self.k, self.v), self.strides[:2], strict=True))
        return replace(self, k=k, v=v)

    def _rows(self, reaches: Sequence[Reach], block: str) -> None:
        """Take a block for all rows at once, or for each that reads any of it."""
        code, spec = self.code, self.spec
        same = code.let(f"icmp eq i64 {self.count}, {self.together}")
        parts = [_within(code, reach, block) for reach in reaches]
        for part in parts[1:]:
            for one, other in zip(part, parts[0], strict=True):
                same = code.let(f"and i1 {same}, {code.let(f'icmp eq i64 {one}, {other}')}")
        with code.where(same):
            places = [row * spec.query_heads + i for row in range(self.together) for i in range(spec.group)]
            self._share("0", places, reaches[0], block).attend(self.most, self.weights)
        with code.where(code.let(f"xor i1 {same}, true")), code.loop(0, self.count) as row:
            reach = self._reach(row.index)
            low, high = _within(code, reach, block)
            with code.where(code.let(f"icmp slt i64 {low}, {high}")):
                self._row(row.index, reach, block)

    def _row(self, row: str, reach: Reach, block: str) -> None:
        """Take a block for the queries of one row."""
        code, group = self.code, self.spec.group
        shares = -(-group // QUERIES)
        size, more = divmod(group, shares)  # as evenly as it goes
        for queries, start, end in ((size + 1, 0, more * (size + 1)), (size, more * (size + 1), group)):
            if start < end:
                with code.loop(start, end, queries) as first:
                    share = self._share(self._query(row, first.index), range(queries), reach, block)
                    state = code.add(code.times(row, group), first.index)
                    share.attend(code.at(self.most, state, 4), code.at(self.weights, state, WIDTH))

    def _share(self, query: str, places: Sequence[int], reach: Reach, block: str) -> Share:
        """Some queries, of which the first is `query`, over a block."""
        code, spec = self.code, self.spec
        q, out = code.at(self.q, query, spec.query_bytes), code.at(self.out, query, spec.values * 4)
        part, cached = _within(code, reach, block), (self.k, self.v, self.more)
        return Share(code, spec, self.room, places, q, out, block, part, reach[1], cached, self.strides)

    def _query(self, row: str, i: str) -> str:
        """The number of a row's query i among all queries, counted from the tile's first."""
        return self.code.add(self.code.times(row, self.spec.query_heads), i)

    def _reach(self, row: str) -> Reach:
        """What a row reads."""
        code = self.code
        end = code.add(code.integer(self.positions, row), 1)
        return code.most(code.let(f"sub i64 {end}, {self.window}"), "0"), end

    def _begin(self, row: str, i: str) -> None:
        """Set out a row's query i."""
        code, spec = self.code, self.spec
        state = code.add(code.times(row, spec.group), i)
        most = code.load("float", code.at(self.sinks, i, 4), 4) if spec.sinks else NONE
        code.store("float", most, code.at(self.most, state, 4), 4)
        weights = vector("float", [fp32(float(spec.sinks and not lane)) for lane in range(LANES)])
        code.store(FLOATS, weights, code.at(self.weights, state, WIDTH), WIDTH)
        for first, count in pieces(spec.values):
            code.write(ZERO, code.at(self.out, self._query(row, i), spec.values * 4), first, count, torch.float32)

    def _finish(self, row: str, i: str) -> None:
        """Divide the output of a row's query i."""
        code, values = self.code, self.spec.values
        state = code.add(code.times(row, self.spec.group), i)
        divisor = code.everywhere(code.total(code.load(FLOATS, code.at(self.weights, state, WIDTH), WIDTH)))
        out = code.at(self.out, self._query(row, i), values * 4)
        for first, count in pieces(values):
            value = code.op("fdiv", code.read(out, first, count, torch.float32), divisor)
            code.write(value, out, first, count, torch.float32)


def _within(code: Kernel, reach: Reach, block: str) -> Reach:
    """Those of the block that begins at a position."""
    return code.most(reach[0], block), code.least(reach[1], code.add(block, BLOCK))
