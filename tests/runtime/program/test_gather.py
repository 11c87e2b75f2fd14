"""Rows of a table by their numbers."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core.runtime.program import gather
from tests.runtime.program.calls import DTYPES, call, drawn, needs_kernels, same
from tests.selection import by_turns

pytestmark = needs_kernels


@pytest.mark.parametrize(("dtype", "scale"), by_turns(DTYPES, (1.0, 32.0, 0.3)))
@settings(max_examples=10, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    width=st.integers(1, 40),
    splits=st.lists(st.integers(0, 9), max_size=3),
    data=st.data(),
)
def test_rows(dtype: torch.dtype, scale: float, seed: int, width: int, splits: list[int], data: st.DataObject) -> None:
    table = drawn(seed, 7, width, wild=True).to(dtype)
    indices = torch.tensor(data.draw(st.lists(st.integers(0, 6), min_size=1, max_size=9)))
    out = torch.full((len(indices) + 1, width), 7.0)
    kernel = gather.kernel(gather.Gather(width, dtype, scale))
    call(kernel, gather.FIELDS, len(indices), splits, table=table, indices=indices, out=out)
    with np.errstate(over="ignore"):
        same(out[:-1], table.float()[indices].numpy() * np.float32(scale))
    assert (out[-1] == 7).all()
