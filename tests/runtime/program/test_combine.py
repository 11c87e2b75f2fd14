"""The weighted sum of a token's experts."""

from typing import Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core.runtime.program.combine import FIELDS, Combine, kernel
from tests.runtime.program import oracle
from tests.runtime.program.calls import call, drawn, needs_kernels, same

pytestmark = needs_kernels


@pytest.mark.parametrize("shared", ["", "plain", "gated"])
@pytest.mark.parametrize(("width", "chosen"), [(5, 1), (64, 8), (100, 3), (136, 2)])
@settings(max_examples=8, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    tokens=st.integers(1, 5),
    splits=st.lists(st.integers(0, 5), max_size=3),
    wild=st.booleans(),
)
def test_tokens(
    width: int,
    chosen: int,
    shared: Literal["", "plain", "gated"],
    seed: int,
    tokens: int,
    splits: list[int],
    wild: bool,
) -> None:
    kernel_, random = kernel(Combine(width, chosen, shared)), torch.Generator().manual_seed(seed)
    experts = drawn(seed, tokens * chosen, width, wild=wild)
    pairs = torch.randperm(tokens * chosen, generator=random).view(tokens, chosen)
    pairs[torch.rand(pairs.shape, generator=random) < 0.2] = -1
    weights, more = drawn(seed + 1, tokens, chosen), drawn(seed + 2, tokens, width, wild=wild)
    gates, out = drawn(seed + 3, tokens) * 3, torch.full((tokens, width), torch.nan)

    def combined(out: torch.Tensor, only: slice, splits: list[int]) -> torch.Tensor:
        """What is computed of some tokens."""
        tensors = dict(pairs=pairs[only], weights=weights[only], shared=more[only], shared_gate=gates[only], out=out)
        call(kernel_, FIELDS, len(out), splits, experts=experts, **tensors)
        return out

    known = oracle.combine(
        experts.numpy(),
        pairs.numpy(),
        weights.numpy(),
        more.numpy() if shared else None,
        gates.numpy() if shared == "gated" else None,
    )
    same(combined(out, slice(None), splits), known)
    same(combined(torch.empty(1, width), slice(tokens - 1, tokens), []), out[-1:])
