"""A bias in slots, added to rows of each slot's product."""

import pytest
import torch

from core.memory.codec.fast.products import numbered
from core.runtime.program.bias import FIELDS, Bias, kernel
from tests.runtime.program.calls import DTYPES, call, drawn, needs_kernels, same

pytestmark = needs_kernels


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [5, 64, 100])
def test_rows_of_slots(width: int, dtype: torch.dtype) -> None:
    counts, before = [3, 0, 1], 16  # bytes of a slot before its bias
    biases = [drawn(i, before // dtype.itemsize + width).to(dtype) for i in range(len(counts))]
    out = torch.full((sum(counts), width + 3), 7.0)
    out[:, :width] = rows = drawn(9, sum(counts), width, wild=True)
    given, done = list[int](), 0
    for count in counts:
        given += (0, numbered(0), count, out[done:].data_ptr(), out.stride(0) * 4)
        done += count
    slots = torch.tensor([one.data_ptr() for one in biases])
    call(kernel(Bias(width, dtype, before)), FIELDS, len(counts), [1], given=torch.tensor(given), slots=slots)
    wanted = torch.cat([one[-width:].float().expand(count, width) for one, count in zip(biases, counts, strict=True)])
    same(out[:, :width].contiguous(), rows + wanted)
    assert (out[:, width:] == 7).all()
