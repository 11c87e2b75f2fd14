"""The forms that rotary embeddings have in transformers' code: which numbers are rotated together, by which entries of
the tables of cosines and sines, and where their results are rounded.

Some of a head's numbers, its first ones, are rotated in couples (a, b) to (a c1 - b s1, b c2 + a s2); the rest are
passed on. `rotated` is the reference of the kernels that compute a form at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

import torch

Order = Literal["halves", "pairs"]  # couple j is at j and j + width / 2, or at 2 j and 2 j + 1
Table = Literal["halves", "pairs", "first"]  # its entries are as its numbers are in that order, or both at j
Pair = tuple[torch.Tensor, torch.Tensor]
Rotate = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], Pair]
"""(q [1, heads, T, head], k [1, ...], cos [1, T, entries], sin [1, ...]) -> q and k, rotated."""


class Form(NamedTuple):
    """A way to rotate."""

    width: int  # how many numbers of a head are rotated
    given: Order  # where the numbers of a couple are
    put: Order  # where their results are put
    table: Table
    rounds: bool  # each product is rounded to the number type of the states, and not only the result

    @property
    def couples(self) -> int:
        return self.width // 2


def forms(head: int, entries: int, *, one_type: bool) -> Iterator[Form]:
    """Every form of heads of `head` numbers by tables of `entries` a token, the usual ones first. Products are rounded
    only in states whose number type is that of the tables (`one_type`)."""
    orders: tuple[Order, ...] = ("halves", "pairs")
    tables: tuple[Table, ...] = ("halves", "first", "pairs")
    for width, rounds in itertools.product((entries, 2 * entries), (True, False) if one_type else (False,)):
        if width > head or width % 2:
            continue
        for given, put, table in itertools.product(orders, orders, tables if width == entries else ("first",)):
            yield Form(width, given, put, table, rounds)


def rotated(form: Form, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [B, heads, T, head] by cos and sin [B, T, entries] -> its shape and type."""

    def wide(some: torch.Tensor) -> torch.Tensor:
        return some if form.rounds else some.float()

    a, b = map(wide, _couples(x[..., : form.width], form.given))
    (c1, c2), (s1, s2) = (map(wide, _entries(form, table.unsqueeze(1))) for table in (cos, sin))
    results = a * c1 - b * s1, b * c2 + a * s2
    put = torch.cat(results, -1) if form.put == "halves" else torch.stack(results, -1).flatten(-2)
    return torch.cat((put.to(x.dtype), x[..., form.width :]), -1)


def _couples(some: torch.Tensor, order: Order) -> Pair:
    half = some.shape[-1] // 2
    return (some[..., :half], some[..., half:]) if order == "halves" else (some[..., 0::2], some[..., 1::2])


def _entries(form: Form, table: torch.Tensor) -> Pair:
    first = table[..., : form.couples]
    return (first, first) if form.table == "first" else _couples(table, form.table)


class Strides(NamedTuple):
    """In numbers, of states [B, heads, T, head] whose numbers of a head are adjacent."""

    token: int
    head: int

    @staticmethod
    def of(states: torch.Tensor) -> Strides:
        return Strides(states.stride(2), states.stride(1))
