"""Rows and experts on a GPU find each other, with experts that multiply by a number each, in any order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core.cache.lease import LeasedSegment
from core.memory.codec.fast.gpu.launch import Groups
from core.memory.slot import Slot
from core.runtime.program.gpu.experts import Where
from core.runtime.program.gpu.rows import GpuMath, GpuRows
from core.runtime.rows import NOTHING, Routed, distinct
from core.types import Outcome, Segment

EXPERTS, WIDTH = 5, 3


class Factors:
    """In the place of GpuExperts: an expert is the factor in its slot's bytes."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        self._at = {slot.raw.data_ptr(): float(slot.raw[0]) for slot in slots}
        self.tokens = 0

    def token(self, where: Where, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        self.tokens += 1
        return self.outputs_at(where.addresses, x).mul(weights[:, None]).sum(0, keepdim=True)

    def outputs_at(self, addresses: Sequence[int], x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x * self._at[address] for address in addresses])

    def outputs(self, groups: Groups, x: torch.Tensor, tiled: bool) -> torch.Tensor:
        bases, ids, ends, row = (one.tolist() for one in groups)
        return torch.cat([x[row[ends[g] : ends[g + 1]]] * self._at[bases[expert]] for g, expert in enumerate(ids)])

    def summed(
        self, outputs: torch.Tensor, pairs: torch.Tensor, weights: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        there = torch.where((pairs >= 0)[..., None], outputs[pairs.clamp(min=0)], 0.0)
        return (there * weights[..., None]).sum(1).to(dtype)


@settings(deadline=None, max_examples=60)
@given(st.data(), st.integers(1, 4), st.integers(1, 3), st.booleans(), st.booleans())
def test_sums_are_those_of_each_row(data: st.DataObject, rows: int, chosen: int, drops: bool, joins: bool) -> None:
    """Whatever is computed together, with experts left out, or joined from elsewhere of one row."""
    some = st.permutations(range(EXPERTS)).map(lambda order: [*order[:chosen]])
    ids = [data.draw(some) for _ in range(rows)]
    if drops:
        ids[0][0] = NOTHING
    slots = [Slot(i, torch.full((16,), i + 2, dtype=torch.uint8)) for i in range(EXPERTS)]
    math, factors = object.__new__(GpuMath), Factors(slots)
    math.gpu = factors  # type: ignore[assignment]
    x, weights = torch.randn(rows, WIDTH), torch.rand(rows, chosen)
    routed = Routed(torch.tensor(ids), weights, ids, distinct(ids), ids)
    outs = list[torch.Tensor]()
    taps = data.draw(st.booleans())
    product: Any = None
    computed = GpuRows(math, product, x, routed, keeps=taps)
    left = [*routed.wanted]
    if joins and rows == 1 and left:
        host = left.pop()
        computed.join([host], x * (host + 2))
    tickets = {expert: data.draw(st.sampled_from([None, "copy"])) for expert in left}
    segments = [
        LeasedSegment(expert, Segment(expert, range(1)), (slots[expert],), Outcome.HIT, tickets[expert])  # type: ignore[arg-type]
        for expert in left
    ]
    for batch in computed.batches(segments):
        computed.compute(batch)
    got = computed.combined(outs.append if taps else None)
    each = torch.tensor([[0.0 if e == NOTHING else e + 2.0 for e in row] for row in ids])
    torch.testing.assert_close(got, x * (each * weights).sum(1, keepdim=True))
    if taps:
        torch.testing.assert_close(outs[0], (x[:, None] * each[..., None]).reshape(-1, WIDTH))
    whole = rows == 1 and not (drops or taps) and (not joins or chosen == 0) and len({*tickets.values()}) == 1
    assert factors.tokens == int(whole)
