"""The gates of attention: found by their sizes, and their activation by trying it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch

from core.errors import ModelError
from core.memory.codec.fast.steps import Work, named, some
from core.runtime.program import gated_heads
from core.runtime.program.gated_heads import GatedHeads
from core.runtime.program.weights import Weight

NAMES = "gate_proj", "g_proj"  # of a product of their own


class Gates(NamedTuple):
    """Where the gates of each head begin in a row [query_heads], int64: of a product of their own (`weight`), or of
    queries, keys and values, behind each head's queries."""

    form: GatedHeads
    columns: torch.Tensor
    weight: Weight | None = None

    @classmethod
    def of(cls, heads: int, width: int, weight: Weight | None = None) -> Gates:
        """Of heads of `width` numbers: a gate of each number, or, of a product of their own, of each head. Raises
        ModelError."""
        if weight is None:
            return cls(GatedHeads(heads, width, "sigmoid"), (2 * torch.arange(heads) + 1) * width)
        if weight.outputs not in (heads, heads * width):
            raise ModelError("gates of some of the heads are not known")
        form = GatedHeads(heads, width, "sigmoid", whole=weight.outputs == heads)
        return cls(form, torch.arange(heads) * (weight.outputs // heads), weight)

    def kinds(self) -> Iterator[Gates]:
        """With each activation that they may have."""
        yield self
        if self.weight is not None:
            yield self._replace(form=replace(self.form, activation="softplus"))

    def work(self, mixed: torch.Tensor, given: torch.Tensor) -> Work:
        """Multiply the heads of all rows by their gates, which are in rows of the product `given`."""
        units, stride = len(mixed) * self.form.heads, given.stride(0) * 4
        at = named(gated_heads.FIELDS, x=mixed, gates=given, columns=self.columns, gates_stride=stride)
        return Work(gated_heads.kernel(self.form), at, units, some(units, 16))
