"""The activation between an expert's products."""

from dataclasses import asdict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core.runtime.program.gate import BLOCK, FIELDS, Gate, kernel
from tests.runtime.program import oracle
from tests.runtime.program.calls import call, drawn, needs_kernels, same

pytestmark = needs_kernels


def oss(width: int) -> Gate:
    """As gpt-oss has it."""
    return Gate(width, interleaved=True, slope=1.702, limit=7.0, shift=1.0)


CASES = [
    Gate(24),
    Gate(BLOCK + 11),
    Gate(BLOCK, "gelu_tanh"),
    Gate(13, "gelu_tanh", interleaved=True, limit=2.0),
    oss(3),
    oss(2 * BLOCK + 6),
    Gate(21, "relu", limit=3.0),
    Gate(37, limit=1.0, of_factors=True),
    Gate(BLOCK + 3, "relu2", ups=False),
    Gate(9, ups=False),
]


def gated(spec: Gate, x: torch.Tensor, splits: list[int]) -> torch.Tensor:
    out = torch.empty(len(x), spec.width)
    call(kernel(spec), FIELDS, len(x) * spec.units, splits, x=x, out=out)
    return out


@pytest.mark.parametrize("spec", CASES, ids=str)
@pytest.mark.parametrize("wild", [False, True])
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 1 << 30), rows=st.integers(1, 4), splits=st.lists(st.integers(0, 12), max_size=3))
def test_rows(spec: Gate, wild: bool, seed: int, rows: int, splits: list[int]) -> None:
    x = drawn(seed, rows, spec.inputs, wild=wild) * 4
    how = asdict(spec)
    del how["width"]
    known = oracle.gate(x.numpy(), **how)
    found = gated(spec, x, splits)
    same(found, known)
    same(gated(spec, x[-1:], []), found[-1:])


def test_it_is_what_torch_computes() -> None:
    x = drawn(1, 5, 80) * 4
    gate, up = x.chunk(2, -1)
    functional = torch.nn.functional
    torch.testing.assert_close(gated(Gate(40), x, []), functional.silu(gate) * up)
    known = functional.gelu(gate, approximate="tanh") * up
    torch.testing.assert_close(gated(Gate(40, "gelu_tanh"), x, []), known, rtol=1e-5, atol=1e-5)
    gate, up = x[:, ::2].clamp(max=7), x[:, 1::2].clamp(-7, 7)
    known = gate * torch.sigmoid(gate * 1.702) * (up + 1)
    torch.testing.assert_close(gated(oss(40), x, []), known)
    torch.testing.assert_close(gated(Gate(80, "relu2", ups=False), x, []), functional.relu(x).square())
