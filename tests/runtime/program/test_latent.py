"""What is computed before attention to latents."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core.runtime.program.latent import FIELDS, Latent, kernel
from core.runtime.program.rms import Norm
from tests.runtime.program import oracle
from tests.runtime.program.calls import call, drawn, needs_kernels, same

pytestmark = needs_kernels
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CASES = [
    Latent(4, 16, 8, Norm(32, 1e-6, BF16), BF16, interleaved=True),
    Latent(3, 5, 12, Norm(24, 1e-5, FP32), FP32),
    Latent(1, 8, 20, Norm(12, 1e-5, FP32, offset=True), FP16, interleaved=True),
]


@pytest.mark.parametrize("spec", CASES, ids=str)
@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    rows=st.integers(1, 5),
    splits=st.lists(st.integers(0, 5), max_size=3),
    wild=st.booleans(),
)
def test_rows(spec: Latent, seed: int, rows: int, splits: list[int], wild: bool) -> None:
    latent, capacity = spec.norm.width, 12
    kv = drawn(seed, rows, latent + spec.turned, wild=wild)
    q = drawn(seed + 1, rows, spec.heads, spec.keys + spec.turned, wild=wild)
    weight, angles = drawn(seed + 2, latent).to(spec.norm.weight or FP32), drawn(seed + 3, rows, spec.turned // 2)
    cos, sin = angles.cos(), angles.sin()
    positions = torch.randperm(capacity, generator=torch.Generator().manual_seed(seed))[:rows]

    def computed(only: slice, splits: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Latents and keys in the cache, and queries."""
        count = len(positions[only])
        latents, keys = (torch.full((capacity, width), 9.0).to(spec.cache) for width in (latent, spec.turned))
        out = torch.full((count, spec.heads, latent + spec.turned), 9.0)
        at = dict(kv=kv[only], q=q[only], weight=weight, cos=cos[only], sin=sin[only], positions=positions[only])
        strides = {f"{name}_stride": one.stride(0) * one.itemsize for name, one in (("latent", latents), ("key", keys))}
        call(kernel(spec), FIELDS, count, splits, latents=latents, keys=keys, out=out, **at, **strides)
        return latents, keys, out

    latents, keys, out = computed(slice(None), splits)
    normed = oracle.rms(kv[:, :latent].numpy(), weight.float().numpy(), spec.norm.eps, spec.norm.offset)
    same(latents[positions], oracle.rounded(normed, spec.cache))
    turns = cos.numpy(), sin.numpy(), spec.interleaved
    same(keys[positions], oracle.rounded(oracle.turned(kv[:, None, latent:].numpy(), *turns)[:, 0], spec.cache))
    same(out[..., latent:].contiguous(), oracle.turned(q[..., spec.keys :].numpy(), *turns))
    others = [p for p in range(capacity) if p not in positions.tolist()]
    assert (out[..., :latent] == 9).all() and (latents[others] == 9).all() and (keys[others] == 9).all()
    for row, position in enumerate(positions.tolist()):
        alone = computed(slice(row, row + 1), [])
        same(alone[0][position], latents[position])
        same(alone[1][position], keys[position])
        same(alone[2][0], out[row])
