"""The gated delta rule."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core.runtime.program.delta_rule import FIELDS, DeltaRule, kernel
from tests.runtime.program import delta_oracle
from tests.runtime.program.calls import call, drawn, needs_kernels, same
from tests.selection import by_turns

pytestmark = needs_kernels
CASES = [DeltaRule(2, 8, 4, 8), DeltaRule(1, 6, 3, 44), DeltaRule(2, 3, 2, 70), DeltaRule(1, 16, 1, 64)]


class Heads:
    """Drawn states, and rows of what changes them."""

    def __init__(self, spec: DeltaRule, rows: int, seed: int, *, wild: bool = False) -> None:
        self.spec = spec
        self.mixed = drawn(seed, rows, spec.channels, wild=wild)
        width = spec.key_heads * spec.key_width
        self.q, self.k = (part.unflatten(1, (spec.key_heads, -1)) for part in self.mixed[:, : 2 * width].chunk(2, -1))
        self.v = self.mixed[:, 2 * width :].unflatten(1, (spec.value_heads, -1))
        if not wild:
            for part in (self.q, self.k):
                part /= part.norm(dim=-1, keepdim=True)
        self.products = drawn(seed + 1, rows, spec.key_heads)
        self.decays, self.rates = (drawn(seed + i, rows, spec.value_heads).sigmoid() for i in (2, 3))
        self.state = drawn(seed + 4, spec.value_heads, spec.key_width, spec.value_width, wild=wild)

    def compute(
        self, state: torch.Tensor, begin: int, end: int, splits: Sequence[int] = (), holds: bool = False
    ) -> torch.Tensor:
        """Rows begin..end - 1, from a state on."""
        spec, rows = replace(self.spec, holds=holds), slice(begin, end)
        out = torch.empty(end - begin, spec.value_heads, spec.value_width)
        of_rows = {name: getattr(self, name)[rows] for name in ("mixed", "products", "decays", "rates")}
        call(kernel(spec), FIELDS, spec.value_heads, splits, rows=end - begin, state=state, out=out, **of_rows)
        return out


@pytest.mark.parametrize(("spec", "wild"), by_turns(CASES, (False, True)), ids=str)
@settings(max_examples=8, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    rows=st.integers(1, 6),
    splits=st.lists(st.integers(0, 12), max_size=3),
    cuts=st.lists(st.integers(0, 9), max_size=4),
)
def test_rows(spec: DeltaRule, wild: bool, seed: int, rows: int, splits: list[int], cuts: list[int]) -> None:
    """... are what the oracle says, in any pieces."""
    case = Heads(spec, rows, seed, wild=wild)
    after, state = case.state.numpy().copy(), case.state.clone()
    parts = [one.numpy() for one in (case.q, case.k, case.v, case.products, case.decays, case.rates)]
    known = delta_oracle.delta_rule(*parts, after)
    ends = sorted({0, rows, *(cut % (rows + 1) for cut in cuts)})
    found = torch.cat([case.compute(state, *piece, splits) for piece in itertools.pairwise(ends)])
    same(found, known)
    same(state, after)
    held = case.state.clone()
    same(case.compute(held, 0, rows, splits, holds=True), known)
    same(held, case.state)


def test_it_is_what_the_models_compute() -> None:
    """The state decays, is corrected where a key reads another value, and is read by the query."""
    case = Heads(DeltaRule(2, 16, 4, 40), 20, 1)
    case.products = (case.q * case.k).sum(-1)
    state, wanted, known = case.state.clone(), case.state.double(), list[torch.Tensor]()
    for row in range(20):
        q, k = (one[row].double().repeat_interleave(2, 0) for one in (case.q, case.k))
        wanted = wanted * case.decays[row, :, None, None]
        off = (case.v[row] - torch.einsum("hkv,hk->hv", wanted, k)) * case.rates[row, :, None]
        wanted = wanted + torch.einsum("hk,hv->hkv", k, off)
        known.append(torch.einsum("hkv,hk->hv", wanted, q))
    torch.testing.assert_close(case.compute(state, 0, 20), torch.stack(known).float(), rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(state, wanted.float(), rtol=1e-5, atol=2e-6)
