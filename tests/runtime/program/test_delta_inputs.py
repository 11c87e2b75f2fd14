"""What the gated delta rule takes of a row."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core.runtime.program import exp
from core.runtime.program.delta_inputs import FIELDS, DeltaInputs, kernel
from core.runtime.program.vectors import LANES, Kernel
from tests.runtime.program import delta_oracle
from tests.runtime.program.calls import call, drawn, needs_kernels, same

pytestmark = needs_kernels
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CASES = [
    DeltaInputs(2, 8, 4, 2 * 16 + 5, FP32, FP32, 1e-6),
    DeltaInputs(1, 13, 9, 2 * 13, BF16, FP16, 1e-6),
    DeltaInputs(3, 32, 6, 2 * 96 + 1, FP32, BF16, 1e-4),
]


class Case:
    """Drawn queries and keys, a and b; and what is computed of them."""

    def __init__(self, spec: DeltaInputs, rows: int, seed: int, *, wild: bool = False) -> None:
        self.spec, heads, random = spec, spec.value_heads, torch.Generator().manual_seed(seed)
        self.mixed = drawn(seed, rows, spec.stride, wild=wild)
        self.given = drawn(seed + 1, rows, 2 * heads + 1, wild=wild) * 4
        order = torch.randperm(2 * heads + 1, generator=random)
        self.a_columns, self.b_columns = order[:heads].contiguous(), order[heads : 2 * heads].contiguous()
        self.a_log = (drawn(seed + 2, heads) * 2).to(spec.a_log)
        self.dt_bias = drawn(seed + 3, heads).to(spec.dt_bias)
        self.products = torch.empty(rows, spec.key_heads)
        self.decays, self.rates = torch.empty(rows, heads), torch.empty(rows, heads)

    @property
    def keys(self) -> list[torch.Tensor]:
        """Queries and keys, [rows, key_heads, key_width]."""
        spec, width = self.spec, self.spec.key_heads * self.spec.key_width
        parts = self.mixed[:, :width], self.mixed[:, width : 2 * width]
        return [part.unflatten(1, (spec.key_heads, spec.key_width)) for part in parts]

    def compute(self, rows: int, splits: list[int]) -> None:
        """In place."""
        names = [name for name in FIELDS if name != "given_stride"]
        given = {name: getattr(self, name) for name in names}
        call(kernel(self.spec), FIELDS, rows, splits, **given, given_stride=self.given.stride(0) * 4)


@pytest.mark.parametrize("spec", CASES, ids=str)
@pytest.mark.parametrize("wild", [False, True])
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 1 << 30), rows=st.integers(1, 5), splits=st.lists(st.integers(0, 5), max_size=3))
def test_rows(spec: DeltaInputs, wild: bool, seed: int, rows: int, splits: list[int]) -> None:
    case = Case(spec, rows, seed, wild=wild)
    q, k = (one.numpy().copy() for one in case.keys)
    a, b = (case.given[:, columns].numpy() for columns in (case.a_columns, case.b_columns))
    wanted = delta_oracle.delta_inputs(q, k, a, b, case.a_log.float().numpy(), case.dt_bias.float().numpy(), spec.eps)
    after = case.mixed[:, 2 * spec.key_heads * spec.key_width :].clone()
    case.compute(rows, splits)
    for found, known in zip((*case.keys, case.products, case.decays, case.rates), wanted, strict=True):
        same(found.contiguous(), known)
    same(case.mixed[:, 2 * spec.key_heads * spec.key_width :].contiguous(), after)


def test_it_is_what_torch_computes() -> None:
    case = Case(CASES[0], 4, 1)
    q, k = (one.clone() for one in case.keys)
    a, b = (case.given[:, columns] for columns in (case.a_columns, case.b_columns))
    case.compute(4, [])
    for found, given_, scale in zip(case.keys, (q, k), (8**-0.5, 1), strict=True):
        torch.testing.assert_close(found, torch.nn.functional.normalize(given_, dim=-1) * scale, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        case.decays, torch.exp(-case.a_log.exp() * torch.nn.functional.softplus(a + case.dt_bias))
    )
    torch.testing.assert_close(case.rates, b.sigmoid())


def test_softplus() -> None:
    """The bits of the order that is stated, and close to the true value, relative to it."""
    code = Kernel("softplus")
    at = code.fields(("x", "out"))
    with code.loop("%from", "%to", LANES) as each:
        value = exp.softplus(code, code.read(at["x"], each.index, LANES, FP32))
        code.write(value, at["out"], each.index, LANES, FP32)
    edges = torch.tensor([0, -0.0, torch.inf, -torch.inf, torch.nan, 3e38, -3e38, 1e-45])
    x = torch.cat([edges, torch.linspace(-80, 80, 160_000)])
    out = torch.empty_like(x)
    call(code.address(), ("x", "out"), len(x), x=x, out=out)
    same(out, delta_oracle.softplus(x.numpy()))
    assert out[2] == torch.inf and out[3] == 0 and out[4].isnan()
    true = torch.from_numpy(np.logaddexp(x[8:].double().numpy(), 0))
    assert float((out[8:].double() / true - 1).abs().max()) < 3e-7
