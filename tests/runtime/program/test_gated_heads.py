"""Heads times their gates."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core.runtime.program.gated_heads import FIELDS, GatedHeads, kernel
from core.runtime.program.rms import Norm
from tests.runtime.program import delta_oracle
from tests.runtime.program.calls import call, drawn, needs_kernels, same

pytestmark = needs_kernels
CASES = [
    GatedHeads(3, 16, "silu", Norm(16, 1e-6, torch.bfloat16)),
    GatedHeads(2, 13, "silu", Norm(13, 1e-5, torch.float32)),
    GatedHeads(4, 8, "sigmoid"),
    GatedHeads(1, 21, "sigmoid"),
    GatedHeads(2, 8, "silu"),
    GatedHeads(3, 8, "softplus"),
    GatedHeads(2, 11, "sigmoid", whole=True),
    GatedHeads(5, 16, "softplus", whole=True),
]


@pytest.mark.parametrize("spec", CASES, ids=str)
@pytest.mark.parametrize("wild", [False, True])
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 1 << 30), rows=st.integers(1, 4), splits=st.lists(st.integers(0, 9), max_size=3))
def test_rows(spec: GatedHeads, wild: bool, seed: int, rows: int, splits: list[int]) -> None:
    x = drawn(seed, rows, spec.heads, spec.width, wild=wild)
    given_ = drawn(seed + 1, rows, spec.heads * spec.width + 2, wild=wild) * 3
    columns = torch.randperm(spec.heads, generator=torch.Generator().manual_seed(seed)) * spec.width + 2
    weight = drawn(seed + 2, spec.width).to((spec.norm.weight if spec.norm else None) or torch.float32)
    size = 1 if spec.whole else spec.width
    gates = torch.stack([given_[:, begin : begin + size] for begin in columns.tolist()], 1)
    known = delta_oracle.gated_heads(
        x.numpy(),
        gates.numpy(),
        spec.activation,
        weight.float().numpy() if spec.norm else None,
        spec.norm.eps if spec.norm else 0,
    )
    alone = x[-1:].clone()
    tensors, stride = dict(columns=columns, weight=weight), given_.stride(0) * 4
    call(kernel(spec), FIELDS, rows * spec.heads, splits, x=x, gates=given_, gates_stride=stride, **tensors)
    same(x, known)
    call(kernel(spec), FIELDS, spec.heads, x=alone, gates=given_[-1:], gates_stride=stride, **tensors)
    same(alone, x[-1:])
