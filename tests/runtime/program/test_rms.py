"""RMSNorm of rows, with and without a residual."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core.runtime.program import rms
from tests.runtime.program import oracle
from tests.runtime.program.calls import DTYPES, call, drawn, needs_kernels, same

pytestmark = needs_kernels


@pytest.mark.parametrize(("width", "out"), [*zip((3, 8, 44), DTYPES, strict=True), (128, torch.bfloat16)])
@pytest.mark.parametrize(
    ("stored", "offset", "adds"),
    [
        (None, False, 0),
        (torch.float32, True, 1),
        (torch.bfloat16, False, 1),
        (torch.bfloat16, False, 0.22),
        (torch.float16, True, 0),
    ],
)
@pytest.mark.parametrize("wild", [False, True])
def test_rows(width: int, out: torch.dtype, stored: torch.dtype | None, offset: bool, adds: float, wild: bool) -> None:
    spec = rms.Rms(rms.Norm(width, 1e-6, stored, offset), out, adds != 0, adds or 1.0)
    x, delta = drawn(width, 9, width, wild=wild), drawn(width + 1, 9, width, wild=wild)
    weight = drawn(2, width).to(stored or torch.float32)
    residual = torch.from_numpy(oracle.fma(delta.numpy(), np.float32(adds), x.numpy())) if adds else x.clone()
    known = oracle.rms(residual.numpy(), weight.float().numpy() if stored else None, 1e-6, offset)
    into = torch.empty(9, width, dtype=out)
    strides = {"x_stride": width * 4, "out_stride": width * out.itemsize}
    call(rms.kernel(spec), rms.FIELDS, 9, [4, 5], x=x, delta=delta, weight=weight, out=into, **strides)
    same(into, oracle.rounded(known, out))
    same(x, residual)


def test_a_sum_times_a_factor() -> None:
    x, delta, factor = drawn(1, 5, 44), drawn(2, 5, 44), torch.tensor([0.7])
    residual, out = (x + delta) * factor, torch.empty(5, 44)
    given = {"x": x, "delta": delta, "factor": factor, "out": out, "x_stride": 176, "out_stride": 176}
    call(rms.kernel(rms.Rms(rms.Norm(44, 1e-6), adds=True, factor=True)), rms.FIELDS, 5, [2], **given)
    same(x, residual)
    same(out, oracle.rms(residual.numpy(), None, 1e-6, False))


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 1 << 30), rows=st.integers(1, 7), splits=st.lists(st.integers(0, 7), max_size=4))
def test_a_row_has_the_same_bits_among_others_and_for_any_split(seed: int, rows: int, splits: list[int]) -> None:
    kernel = rms.kernel(rms.Rms(rms.Norm(44, 1e-5)))
    x = drawn(seed, rows, 50, wild=True)
    out, alone = torch.full((rows, 48), 7.0), torch.empty(1, 44)
    call(kernel, rms.FIELDS, rows, splits, x=x, out=out, x_stride=200, out_stride=192)
    assert (out[:, 44:] == 7).all()
    for row in range(rows):
        call(kernel, rms.FIELDS, 1, x=x[row], out=alone, x_stride=200, out_stride=192)
        same(out[row : row + 1, :44], alone)
