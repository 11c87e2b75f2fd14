"""The fused product of queries, keys and values -> normed and rotated queries, and keys and values in the cache.

A pair (a, b) of a head is turned by its angle into fma(a, cos, -(b * sin)) and fma(b, cos, a * sin).
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from core.runtime.program.rms import Norm, scale, scaled
from core.runtime.program.vectors import FLOATS, LANES, ZERO, Kernel, number, pieces

STRIDES = ("k_head_stride", "k_row_stride", "v_head_stride", "v_row_stride")
FIELDS = ("qkv", "bias", "q_weight", "k_weight", "cos", "sin", "positions", "q", "k", "v", *STRIDES)
Load = Callable[[int, int], str]  # (first, count) of the numbers of a head


@dataclass(frozen=True)
class Rotate:
    """Heads of `width` numbers, of which the first `rotated` are turned: number i with i + rotated / 2, or, where
    `interleaved`, 2i with 2i + 1. `bias`: the type of what is added to the product first; None = nothing. `norm`: of
    each head of queries and keys, before it is turned, or, `norm_last`, after it; `value_norm`, without weights: of
    values. A norm of all heads at once is rms.py's, in place, before this. `gated`: each head of queries is
    followed by as many numbers, which are left alone. `ring`: position p is where p mod ring would be; 0 = where p
    is. Heads of values have `values` numbers, 0 = as many as keys, which are multiplied by `value_scale`."""

    query_heads: int
    heads: int
    width: int
    rotated: int
    cache: torch.dtype
    norm: Norm | None = None
    bias: torch.dtype | None = None
    interleaved: bool = False
    norm_last: bool = False
    value_norm: Norm | None = None
    ring: int = 0
    gated: bool = False
    values: int = 0
    value_scale: float = 1.0

    def __post_init__(self) -> None:
        assert self.query_heads % self.heads == 0 and self.rotated % 2 == 0 and self.rotated <= self.width
        assert all(norm is None or norm.width == self.width for norm in (self.norm, self.value_norm))
        assert self.value_norm is None or (self.value_norm.weight is None and not self.values)

    @property
    def keys(self) -> int:
        """Heads of a product before the first one of keys."""
        return self.query_heads * (1 + self.gated)


@functools.cache
def kernel(spec: Rotate) -> int:
    """The address of the kernel. Unit row * heads + h is head h of keys and values of a row, and the queries that
    read it. qkv [rows, (spec.keys + heads) * width + heads * values], queries first; cos and sin [rows, rotated / 2];
    q [rows, query_heads, width]: all fp32. Head h of position p lies at k + h * k_head_stride + p * k_row_stride bytes,
    in the cache's type, where p = positions[row], i64."""
    code, size, values = Kernel("rotate"), spec.width * 4, spec.values or spec.width
    made = code.stack(size)
    at, group = code.fields(FIELDS, STRIDES), spec.query_heads // spec.heads
    itemsize, products = spec.bias.itemsize if spec.bias else 0, (spec.keys + spec.heads) * spec.width
    with code.loop("%from", "%to") as unit:
        row, head = (code.let(f"{name} i64 {unit.index}, {spec.heads}") for name in ("udiv", "urem"))
        given = code.at(at["qkv"], row, (products + spec.heads * values) * 4)
        cos, sin = (code.at(at[name], row, spec.rotated * 2) for name in ("cos", "sin"))
        q = code.at(at["q"], row, spec.query_heads * size)
        position = code.integer(at["positions"], row)
        if spec.ring:
            position = code.let(f"urem i64 {position}, {spec.ring}")
        k, v = (_cached(code, at, name, head, position) for name in "kv")

        def numbers(index: str, width: int = spec.width, before: int = 0) -> Load:
            x, bias = (
                code.at(code.at(of, before, each), index, width * each)
                for of, each in ((given, 4), (at["bias"], itemsize))
            )

            def some(first: int, count: int) -> str:
                value = code.read(x, first, count, torch.float32)
                return code.op("fadd", value, code.read(bias, first, count, spec.bias)) if spec.bias else value

            return some

        def rotate(x: Load, out: str, dtype: torch.dtype, cos: str = cos, sin: str = sin) -> None:
            turn(code, spec.rotated, spec.interleaved, x, cos, sin, out, dtype)
            copy(code, x, spec.width, out, dtype, spec.rotated)

        def put(index: str, weight: str, out: str, dtype: torch.dtype) -> None:
            x = numbers(index)
            if spec.norm is None:
                rotate(x, out, dtype)
            elif spec.norm_last:
                rotate(x, made, torch.float32)
                turned = functools.partial(code.read, made, dtype=torch.float32)
                copy(code, normed(code, spec.norm, turned, weight), spec.width, out, dtype)
            else:
                rotate(normed(code, spec.norm, x, weight), out, dtype)

        first = code.times(head, group)
        with code.loop(first, code.add(first, group)) as each:
            put(code.times(each.index, 1 + spec.gated), at["q_weight"], code.at(q, each.index, size), torch.float32)
        put(code.add(head, spec.keys), at["k_weight"], k, spec.cache)
        own = numbers(head, values, products)
        if spec.value_norm:
            own = normed(code, spec.value_norm, own, "")
        if spec.value_scale != 1:
            own = _times(code, own, spec.value_scale)
        copy(code, own, values, v, spec.cache)
    return code.address()


def _cached(code: Kernel, at: dict[str, str], name: str, head: str, position: str) -> str:
    """The address of a head of a position in the cache of keys or values."""
    begin = code.at(at[name], code.times(head, at[f"{name}_head_stride"]))
    return code.at(begin, code.times(position, at[f"{name}_row_stride"]))


def _times(code: Kernel, x: Load, factor: float) -> Load:
    return lambda first, count: code.op("fmul", x(first, count), number(factor))


def normed(code: Kernel, norm: Norm, x: Load, weight: str) -> Load:
    """The numbers of a head after a norm."""
    squares = ZERO
    for first, count in pieces(norm.width):
        value = x(first, count)
        squares = code.fma(value, value, squares)
    factor = scale(code, norm, squares)
    return lambda first, count: scaled(code, norm, x(first, count), factor, weight, first, count)


def copy(code: Kernel, x: Load, width: int, out: str, dtype: torch.dtype, start: int = 0) -> None:
    """Store the numbers of a head from `start` on, each rounded once."""
    for first, count in pieces(width - start):
        code.write(x(start + first, count), out, start + first, count, dtype)


def turn(
    code: Kernel, rotated: int, interleaved: bool, x: Load, cos: str, sin: str, out: str, dtype: torch.dtype
) -> None:
    """Rotate the first numbers of a head and store them."""
    half = rotated // 2
    for first, count in pieces(half):
        if interleaved:
            left = min(LANES, 2 * count)
            both = [x(2 * first, left), x(2 * first + left, 2 * count - left) if 2 * count > left else ZERO]
            a, b = (code.pick(FLOATS, both[0], range(start, 16, 2), both[1]) for start in (0, 1))
        else:
            a, b = x(first, count), x(half + first, count)
        c, s = (code.read(table, first, count, torch.float32) for table in (cos, sin))
        away = code.let(f"fneg {FLOATS} {code.op('fmul', b, s)}")
        one, other = code.fma(a, c, away), code.fma(b, c, code.op("fmul", a, s))
        if interleaved:
            for start in range(0, 2 * count, LANES):
                places = [place for i in range(start // 2, start // 2 + 4) for place in (i, i + LANES)]
                mixed = code.pick(FLOATS, one, places, other)
                code.write(mixed, out, 2 * first + start, min(LANES, 2 * count - start), dtype)
        else:
            code.write(one, out, first, count, dtype)
            code.write(other, out, half + first, count, dtype)
