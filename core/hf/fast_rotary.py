"""Rotary embeddings of queries and keys on a CPU in one native call, where a model's own code makes some twenty of
torch's, on so few numbers that the calls take most of the time."""

import ctypes
import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch

from core.hf.rotary_form import Form, Order, Pair, Rotate, Strides
from core.system.native import numbers
from core.system.native.compile import Function, compiled, widths
from core.system.native.ir import Code

MOST = 1 << 17  # numbers of queries and keys: more are shared among torch's threads
LANES = 16
PARTS = ("q", "k")
OF_A_PART = ("heads", "token", "head", "token_out", "head_out")  # how many, and strides of states and results
FIELDS = ("tokens", "cos", "sin", *(f"{part}_{field}" for part in PARTS for field in OF_A_PART))
"""The function's layout argument, as i64: tokens, strides of the tables, and of each part."""


class Kind(NamedTuple):
    """Compile-time parameters of a function."""

    form: Form
    heads: tuple[int, int]  # numbers of a head of the queries, and of the keys
    dtype: torch.dtype
    table: torch.dtype


def available(device: torch.device) -> bool:
    """Whether native code can be tried."""
    return bool(widths())


def takes(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor) -> bool:
    """Whether a call can be computed here."""
    known = q.dtype in numbers.KINDS and cos.dtype in numbers.KINDS
    return known and q.numel() + k.numel() <= MOST


class NativeRotation:
    """Rotates queries and keys [1, heads, T, head] of the shapes and strides of those it is made with."""

    def __init__(self, form: Form, states: Pair, tables: Pair, results: Pair) -> None:
        """`results`: tensors of the shapes and strides that its own should have."""
        self.form = form
        q, k = results
        self._dtype, self._q, self._k = q.dtype, (q.shape, q.stride()), (k.shape, k.stride())
        layout = [q.shape[2], *(table.stride(1) for table in tables)]
        for x, out in zip(states, results, strict=True):
            layout += [x.shape[1], *Strides.of(x), *Strides.of(out)]
        self._fields = (ctypes.c_int64 * len(FIELDS))(*layout)
        self._layout = ctypes.addressof(self._fields)
        self._rotate = _function(Kind(form, (q.shape[-1], k.shape[-1]), q.dtype, tables[0].dtype))

    def __call__(self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Pair:
        one = torch.empty_strided(*self._q, dtype=self._dtype)
        other = torch.empty_strided(*self._k, dtype=self._dtype)
        given = q.data_ptr(), k.data_ptr(), cos.data_ptr(), sin.data_ptr()
        self._rotate(*given, one.data_ptr(), other.data_ptr(), self._layout)
        return one, other


def made(form: Form, states: Pair, tables: Pair, results: Pair) -> Rotate:
    """What computes a form for arguments such as these."""
    return NativeRotation(form, states, tables, results)


@functools.cache
def _function(kind: Kind) -> Function:
    return compiled(_rotate(kind), width=widths()[0])["rotate"]


def _rotate(kind: Kind) -> Code:
    """Generates @rotate(q, k, cos, sin, q_out, k_out, layout)."""
    code = Code("void @rotate(ptr %q, ptr %k, ptr %cos, ptr %sin, ptr noalias %q_out, ptr noalias %k_out, ptr %layout)")
    layout = {name: code.load("i64", code.at("%layout", i, 8), 8) for i, name in enumerate(FIELDS)}
    with code.loop(0, layout["tokens"]) as token:
        tables = [("%" + name, code.times(token.index, layout[name])) for name in ("cos", "sin")]
        for part, numbers_of_one in zip(PARTS, kind.heads, strict=True):
            heads, by_token, by_head, token_out, head_out = (layout[f"{part}_{field}"] for field in OF_A_PART)
            first, first_out = code.times(token.index, by_token), code.times(token.index, token_out)
            with code.loop(0, heads) as head:
                at = code.add(first, code.times(head.index, by_head))
                to = code.add(first_out, code.times(head.index, head_out))
                _turn(code, kind, (f"%{part}", at), (f"%{part}_out", to), tables)
                _pass_on(code, kind, (f"%{part}", at), (f"%{part}_out", to), numbers_of_one)
    return code


Place = tuple[str, str]  # pointer, index of a first number


def _turn(code: Code, kind: Kind, source: Place, target: Place, tables: Sequence[Place]) -> None:
    """The couples of one head."""
    form, dtype = kind.form, kind.dtype
    lanes = _lanes(form.couples)
    floats = f"<{lanes} x float>"

    def product(one: str, other: str) -> str:
        found = code.let(f"fmul {floats} {one}, {other}")
        return numbers.again(code, found, lanes, dtype) if form.rounds else found

    with code.loop(0, form.couples, lanes) as each:
        a, b = _load(code, source, each.index, form.given, form.couples, lanes, dtype)
        if form.table == "first":
            ones = [numbers.load(code, of, code.add(at, each.index), lanes, kind.table) for of, at in tables]
            (c1, c2), (s1, s2) = ((one, one) for one in ones)
        else:
            (c1, c2), (s1, s2) = (
                _load(code, table, each.index, form.table, form.couples, lanes, kind.table) for table in tables
            )
        one = code.let(f"fsub {floats} {product(a, c1)}, {product(b, s1)}")
        other = code.let(f"fadd {floats} {product(b, c2)}, {product(a, s2)}")
        _store(code, target, each.index, form.put, form.couples, dtype, (one, other))


def _load(
    code: Code, source: Place, index: str, order: Order, couples: int, lanes: int, dtype: torch.dtype
) -> tuple[str, str]:
    """The two numbers of `lanes` couples from couple `index` on, as vectors of fp32."""
    pointer, first = source
    if order == "halves":
        at = code.add(first, index)
        return tuple(numbers.load(code, pointer, code.add(at, n), lanes, dtype) for n in (0, couples))  # type: ignore[return-value]
    both = numbers.load(code, pointer, code.add(first, code.times(index, 2)), 2 * lanes, dtype)
    return tuple(code.pick(f"<{2 * lanes} x float>", both, range(n, 2 * lanes, 2)) for n in (0, 1))  # type: ignore[return-value]


def _store(
    code: Code, target: Place, index: str, order: Order, couples: int, dtype: torch.dtype, results: tuple[str, str]
) -> None:
    (pointer, first), lanes = target, _lanes(couples)
    if order == "halves":
        at = code.add(first, index)
        for n, result in zip((0, couples), results, strict=True):
            numbers.store(code, result, pointer, code.add(at, n), lanes, dtype)
        return
    mixed = [place for lane in range(lanes) for place in (lane, lanes + lane)]
    both = code.pick(f"<{lanes} x float>", results[0], mixed, results[1])
    numbers.store(code, both, pointer, code.add(first, code.times(index, 2)), 2 * lanes, dtype)


def _pass_on(code: Code, kind: Kind, source: Place, target: Place, head: int) -> None:
    """The numbers of one head that are not rotated."""
    width, size = kind.form.width, kind.dtype.itemsize
    if head == width:
        return
    lanes = _lanes(head - width)
    vector = f"<{lanes} x i{8 * size}>"
    with code.loop(width, head, lanes) as each:
        places = [code.at(pointer, code.add(first, each.index), size) for pointer, first in (source, target)]
        code.store(vector, code.load(vector, places[0], size), places[1], size)


def _lanes(count: int) -> int:
    """The most numbers at once that leave none over: a power of two."""
    return min(LANES, count & -count)
