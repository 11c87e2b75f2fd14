"""The causal convolution of channels over rows."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core.runtime.program.convolve import FIELDS, Convolve, kernel
from tests.runtime.program import delta_oracle
from tests.runtime.program.calls import call, drawn, needs_kernels, same

pytestmark = needs_kernels
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CASES = [
    Convolve(24, 8, 4, BF16, BF16),
    Convolve(40, 20, 4, FP16, FP32, bias=True),
    Convolve(12, 4, 3, FP32, FP16),
    Convolve(18, 18, 2, BF16, FP32, bias=True),
    Convolve(22, 11, 5, FP16, BF16),
]


class Channels:
    """Drawn weights and inputs of a layer, whose strips lie in another order than in its output."""

    def __init__(self, spec: Convolve, rows: int, seed: int, *, wild: bool = False) -> None:
        self.spec, random = spec, torch.Generator().manual_seed(seed)
        self.x = drawn(seed, rows, spec.channels + 3, wild=wild) * 3
        self.columns = torch.randperm(spec.units, generator=random) * spec.strip + 3
        self.weight = drawn(seed + 1, spec.size, spec.channels).to(spec.weight)
        self.bias = drawn(seed + 2, spec.channels).to(spec.weight)
        self.state = drawn(seed + 3, spec.channels, spec.size, wild=wild).to(spec.state)

    @property
    def inputs(self) -> torch.Tensor:
        """[rows, channels], in the order of the output."""
        return torch.cat([self.x[:, begin : begin + self.spec.strip] for begin in self.columns.tolist()], -1)

    def compute(
        self, state: torch.Tensor, begin: int, end: int, splits: Sequence[int] = (), holds: bool = False
    ) -> torch.Tensor:
        """Rows begin..end - 1, from a state on."""
        out, spec = torch.empty(end - begin, self.spec.channels), replace(self.spec, holds=holds)
        sizes = {"rows": end - begin, "x_stride": self.x.stride(0) * 4}
        tensors = dict(columns=self.columns, weight=self.weight, bias=self.bias, state=state, out=out)
        call(kernel(spec), FIELDS, spec.units, splits, x=self.x[begin:], **tensors, **sizes)
        return out


@pytest.mark.parametrize("spec", CASES, ids=str)
@pytest.mark.parametrize("wild", [False, True])
@settings(max_examples=8, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    rows=st.integers(1, 9),
    splits=st.lists(st.integers(0, 5), max_size=3),
    cuts=st.lists(st.integers(0, 9), max_size=4),
)
def test_rows(spec: Convolve, wild: bool, seed: int, rows: int, splits: list[int], cuts: list[int]) -> None:
    """... are what the oracle says, in any pieces."""
    case = Channels(spec, rows, seed, wild=wild)
    weight, bias = case.weight.float().numpy(), case.bias.float().numpy() if spec.bias else None
    known, after = delta_oracle.convolve(case.inputs.numpy(), case.state, weight, bias)
    ends, state = sorted({0, rows, *(cut % (rows + 1) for cut in cuts)}), case.state.clone()
    found = torch.cat([case.compute(state, *piece, splits) for piece in itertools.pairwise(ends)])
    same(found, known)
    same(state, after)
    held = case.state.clone()
    same(case.compute(held, 0, rows, splits, holds=True), known)
    same(held, case.state)


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_it_is_what_torch_computes(dtype: torch.dtype) -> None:
    spec = Convolve(24, 8, 4, dtype, FP32, bias=True)
    case = Channels(spec, 7, 1)
    inputs = torch.cat([case.state.T.float(), case.inputs.to(dtype).float()]).T[None]
    weight = case.weight.T[:, None]
    known = torch.nn.functional.conv1d(inputs[..., 1:], weight, case.bias, groups=spec.channels)
    found = case.compute(case.state.clone(), 0, 7)
    torch.testing.assert_close(found, torch.nn.functional.silu(known)[0].T)
