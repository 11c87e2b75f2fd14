"""Phi-MoE's stretched rotary embedding with one factor: transformers' numbers, without looking at the positions."""

import pytest
import torch
from transformers import AutoConfig
from transformers.models.phimoe.modeling_phimoe import PhimoeRotaryEmbedding

from core.hf.adapters import adapt


def rotary(long: float) -> PhimoeRotaryEmbedding:
    rope = dict(
        rope_type="longrope",
        rope_theta=10000.0,
        short_factor=[1.0, 1.25, 2.0, 3.0],
        long_factor=[1.0, 4.0, 16.0, 64.0],
        short_mscale=1.25,
        long_mscale=long,
        original_max_position_embeddings=64,
    )
    return PhimoeRotaryEmbedding(
        AutoConfig.for_model("phimoe", hidden_size=32, num_attention_heads=4, rope_parameters=rope)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cosines_and_sines_are_transformers_own(dtype: torch.dtype) -> None:
    own, ours = rotary(1.25), rotary(1.25)
    adapt(ours)
    for positions in (torch.arange(8)[None], torch.arange(60, 100)[None]):  # the second beyond the original length
        like = torch.ones(1, dtype=dtype)
        for wanted, got in zip(own(like, positions), ours(like, positions), strict=True):
            assert torch.equal(got, wanted) and got.dtype == dtype
    cos, _ = ours(torch.ones(1, device="meta"), torch.ones(1, 5, dtype=torch.long, device="meta"))
    assert cos.shape == (1, 5, 8)


def test_with_two_factors_it_decides_as_before() -> None:
    ours = rotary(1.5)
    adapt(ours)
    assert type(ours) is PhimoeRotaryEmbedding
