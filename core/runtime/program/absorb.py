"""The matrix between latents and the heads' keys and values, on both sides of attention to latents.

Row h * (keys + values) + i of the matrix gives number i of head h: its keys, then its values. With w its weights in
fp32 (`core.memory.codec.fast.unpack`), k the places of a latent:
    queries:  out[h, k] = fma(x[h, i], w[i, k], out[h, k]), from 0, in the order of i < keys
    values:   out[h, i] = the sum over k of x[h, k] * w[keys + i, k]
"""

import functools
from dataclasses import dataclass

import torch

from core.memory.codec.fast.unpack import SOME, unpacked
from core.memory.codec.matrix import Matrix
from core.runtime.program.vectors import ZERO, Kernel, pieces

FIELDS = ("x", "slot", "out", "rows")
AT_ONCE = 4  # rows of x for which weights are unpacked once
SUMMED = 2  # rows of the matrix whose products are added to the queries' latents together
VALUES = {AT_ONCE: 2, 1: 4}  # rows of the matrix that are multiplied by so many rows of x


@dataclass(frozen=True)
class Absorb:
    """`heads` with so many `keys` and `values`; `turned`: numbers of a query after its `keys`, which follow its latent
    as well and are left alone."""

    matrix: Matrix
    heads: int
    keys: int
    values: int
    turned: int

    def __post_init__(self) -> None:
        assert self.matrix.outputs == self.heads * (self.keys + self.values)

    @property
    def latent(self) -> int:
        return self.matrix.inputs


@functools.cache
def queries(spec: Absorb) -> int:
    """The address of the kernel for queries. A unit is a head: x [rows, heads, keys + turned] -> out [rows, heads,
    latent + turned], fp32."""
    code, size = Kernel("absorb_queries"), (spec.keys + spec.turned) * 4
    at = code.fields(FIELDS, ("rows",))
    with code.loop("%from", "%to") as head:
        first = code.times(head.index, spec.keys + spec.values)
        for begin, end, states in _tiles(code, at["rows"]):
            with code.loop(begin, end, states) as state:
                heads = [_of_head(code, spec, state.index, s, head.index) for s in range(states)]
                x = [code.at(at["x"], one, size) for one in heads]
                out = [code.at(at["out"], one, (spec.latent + spec.turned) * 4) for one in heads]
                for one in out:
                    for start, count in pieces(spec.latent):
                        code.write(ZERO, one, start, count, torch.float32)
                whole = spec.keys - spec.keys % SUMMED
                with code.loop(0, whole, SUMMED) as some:
                    _absorb(code, spec, at["slot"], first, some.index, SUMMED, x, out)
                with code.loop(whole, spec.keys) as rest:
                    _absorb(code, spec, at["slot"], first, rest.index, 1, x, out)
    return code.address()


@functools.cache
def values(spec: Absorb) -> int:
    """The address of the kernel for values. A unit is a head: x [rows, heads, latent] -> out [rows, heads, values],
    fp32."""
    code = Kernel("absorb_values")
    at = code.fields(FIELDS, ("rows",))
    with code.loop("%from", "%to") as head:
        first = code.add(code.times(head.index, spec.keys + spec.values), spec.keys)
        for begin, end, states in _tiles(code, at["rows"]):
            with code.loop(begin, end, states) as state:
                heads = [_of_head(code, spec, state.index, s, head.index) for s in range(states)]
                x = [code.at(at["x"], one, spec.latent * 4) for one in heads]
                out = [code.at(at["out"], one, spec.values * 4) for one in heads]
                whole = spec.values - spec.values % VALUES[states]
                with code.loop(0, whole, VALUES[states]) as some:
                    _values(code, spec, at["slot"], first, some.index, VALUES[states], x, out)
                with code.loop(whole, spec.values) as rest:
                    _values(code, spec, at["slot"], first, rest.index, 1, x, out)
    return code.address()


def _tiles(code: Kernel, rows: str) -> list[tuple[str, str, int]]:
    """(first, end, rows at once)."""
    whole = code.let(f"and i64 {rows}, {-AT_ONCE}")
    return [("0", whole, AT_ONCE), (whole, rows, 1)]


def _of_head(code: Kernel, spec: Absorb, row: str, after: int, head: str) -> str:
    """The number of a row's head among the heads of all rows."""
    return code.add(code.times(code.add(row, after), spec.heads), head)


def _absorb(
    code: Kernel, spec: Absorb, slot: str, first: str, i: str, count: int, x: list[str], out: list[str]
) -> None:
    """Add the products of numbers i.. of some queries to their latents."""
    rows = [code.add(code.add(first, i), n) for n in range(count)]
    held = [[code.spread(one, code.add(i, n)) for n in range(count)] for one in x]
    for some in code.over(spec.latent, size=SOME):
        weights = [unpacked(code, spec.matrix, slot, row, str(some.first), some.count) for row in rows]
        for own, into in zip(held, out, strict=True):
            begin = code.at(into, some.first, 4)
            for v, (start, lanes) in enumerate(some.pieces):
                value = code.read(begin, start, lanes, torch.float32)
                for n in range(count):
                    value = code.fma(own[n], weights[n][v], value)
                code.write(value, begin, start, lanes, torch.float32)


def _values(
    code: Kernel, spec: Absorb, slot: str, first: str, i: str, count: int, x: list[str], out: list[str]
) -> None:
    """Numbers i.. of the values of some rows."""
    rows = [code.add(code.add(first, i), n) for n in range(count)]
    for some in code.over(spec.latent, [ZERO] * (count * len(x)), SOME):
        weights = [unpacked(code, spec.matrix, slot, row, str(some.first), some.count) for row in rows]
        for v, (start, lanes) in enumerate(some.pieces):
            seen = [code.read(code.at(one, some.first, 4), start, lanes, torch.float32) for one in x]
            some.values = [
                code.fma(weights[n][v], given, some.values[s * count + n])
                for s, given in enumerate(seen)
                for n in range(count)
            ]
    for s, into in enumerate(out):
        for n in range(count):
            code.store("float", code.total(some.values[s * count + n]), code.at(into, code.add(i, n), 4), 4)
