"""The matrix between latents and heads, on both sides of attention."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core.runtime.program import absorb
from core.runtime.program.absorb import Absorb
from tests.kernel_cases import CODED, FEW
from tests.memory.fast import product_oracle
from tests.memory.fast.cases import GROUPS, case
from tests.runtime.program import oracle
from tests.runtime.program.calls import call, drawn, needs_kernels, same
from tests.selection import layered

pytestmark = needs_kernels
PLAIN = ("bfloat16", "float16", "float32")
FORMATS = layered([*CODED, *PLAIN], quick=(*FEW, "mxfp4", "nvfp4", *PLAIN).__contains__)
KINDS = layered([*CODED, *PLAIN], quick=("int4-g64", "bfloat16").__contains__)
# test_canonical.py reads the others as well
SHAPES = st.sampled_from([(1, 2, 4), (3, 5, 3), (2, 16, 12)])  # heads, keys, values


@pytest.mark.parametrize("format", KINDS)
@settings(max_examples=6, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    shape=SHAPES,
    blocks=st.integers(1, 3),
    rows=st.integers(1, 9),
    splits=st.lists(st.integers(0, 3), max_size=2),
    wild=st.booleans(),
)
def test_rows(
    format: str, seed: int, shape: tuple[int, int, int], blocks: int, rows: int, splits: list[int], wild: bool
) -> None:
    (heads, keys, values), turned = shape, 3
    latent = blocks * GROUPS.get(format, 64) if format in CODED else blocks * 20
    matrix, slots, _ = case(format, heads * (keys + values), latent)
    spec, weights = Absorb(matrix, heads, keys, values, turned), product_oracle.weights(matrix, slots[0]).numpy()
    weights = weights.reshape(heads, keys + values, latent)
    x = drawn(seed, rows, heads, keys + turned, wild=wild)
    wanted = np.zeros((rows, heads, latent), np.float32)
    with np.errstate(all="ignore"):
        for i in range(keys):
            wanted = oracle.fma(x[:, :, i, None].numpy(), weights[:, i], wanted)
    found = torch.full((rows, heads, latent + turned), 9.0)
    given = dict(slot=slots[0])
    call(absorb.queries(spec), absorb.FIELDS, heads, splits, x=x, out=found, rows=rows, **given)
    same(found[..., :latent].contiguous(), wanted)
    assert (found[..., latent:] == 9).all()
    mixed, out = drawn(seed + 1, rows, heads, latent, wild=wild), torch.empty(rows, heads, values)
    call(absorb.values(spec), absorb.FIELDS, heads, splits, x=mixed, out=out, rows=rows, **given)
    same(out, oracle.dot(mixed[:, :, None].numpy(), weights[:, keys:]))


@pytest.mark.parametrize("format", FORMATS)
def test_weights_are_those_of_the_format(format: str) -> None:
    matrix, slots, dequantized = case(format, 24, 2 * GROUPS.get(format, 64))
    torch.testing.assert_close(product_oracle.weights(matrix, slots[0]), dequantized.float(), rtol=1e-2, atol=1e-3)
