"""Tiny random checkpoints of real architectures, written to disk the way transformers saves them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.architectures.tiny import tiny

COMMON: dict[str, Any] = dict(
    vocab_size=256,
    hidden_size=64,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=None,
)
LATENT: dict[str, Any] = dict(
    num_key_value_heads=4, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16
)
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "mixtral": dict(intermediate_size=96, num_local_experts=8, num_experts_per_tok=2),
    "qwen2_moe": dict(
        intermediate_size=96,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=80,
        num_experts=8,
        num_experts_per_tok=4,
    ),
    "qwen3_moe": dict(
        intermediate_size=96, moe_intermediate_size=64, num_experts=8, num_experts_per_tok=4, head_dim=16
    ),
    "olmoe": dict(intermediate_size=64, num_experts=8, num_experts_per_tok=4),
    "phimoe": dict(intermediate_size=96, num_local_experts=8, num_experts_per_tok=2),
    "gpt_oss": dict(intermediate_size=96, num_local_experts=8, num_experts_per_tok=4, head_dim=16, sliding_window=32),
    "glm4_moe": dict(
        intermediate_size=96,
        moe_intermediate_size=64,
        n_routed_experts=8,
        num_experts_per_tok=4,
        n_shared_experts=1,
        first_k_dense_replace=1,
        n_group=1,
        topk_group=1,
        head_dim=16,
    ),
    "deepseek_v2": dict(
        LATENT,
        intermediate_size=96,
        moe_intermediate_size=64,
        n_routed_experts=8,
        num_experts_per_tok=4,
        n_shared_experts=2,
        first_k_dense_replace=1,
        n_group=2,
        topk_group=1,
        topk_method="group_limited_greedy",
        q_lora_rank=None,
        routed_scaling_factor=1.5,
    ),
    "deepseek_v3": dict(
        LATENT,
        intermediate_size=96,
        moe_intermediate_size=64,
        n_routed_experts=8,
        num_experts_per_tok=4,
        n_shared_experts=1,
        first_k_dense_replace=1,
        n_group=2,
        topk_group=1,
        q_lora_rank=32,
    ),
    "granitemoe": dict(intermediate_size=64, num_local_experts=8, num_experts_per_tok=4),
}
SMALL: dict[str, Any] = dict(intermediate_size=96, moe_intermediate_size=64, num_experts_per_tok=4)
LINEAR: dict[str, Any] = dict(
    linear_conv_kernel_dim=4,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    layer_types=["linear_attention", "linear_attention", "full_attention"],
)
INDEXED: dict[str, Any] = dict(index_topk=8, index_head_dim=16, index_n_heads=4)
EXTRA: dict[str, dict[str, Any]] = {  # built on request: a router with a second argument
    "minimax_m2": dict(intermediate_size=64, num_local_experts=8, num_experts_per_tok=4, head_dim=16, rotary_dim=16),
}
MORE: dict[str, dict[str, Any]] = {  # tested on fewer cases (tests/equality/test_more.py)
    "ernie4_5_moe": dict(
        intermediate_size=96,
        moe_intermediate_size=64,
        moe_num_experts=8,
        moe_k=4,
        moe_num_shared_experts=1,
        moe_layer_start_index=1,
    ),
    "dots1": dict(
        SMALL,
        n_routed_experts=8,
        n_shared_experts=1,
        first_k_dense_replace=1,
        n_group=2,
        topk_group=1,
        norm_topk_prob=True,
        head_dim=16,
    ),
    "lfm2_moe": dict(SMALL, num_experts=8, num_dense_layers=1, layer_types=["conv", "conv", "full_attention"]),
    "qwen3_next": dict(SMALL, **LINEAR, num_experts=8, shared_expert_intermediate_size=80, head_dim=16),
    "qwen3_5_moe_text": dict(SMALL, **LINEAR, num_experts=8, shared_expert_intermediate_size=80, head_dim=16),
    "flex_olmo": dict(intermediate_size=64, num_experts=8, num_experts_per_tok=4),
    "granitemoeshared": dict(
        intermediate_size=64, num_local_experts=8, num_experts_per_tok=4, shared_intermediate_size=64
    ),
    "granitemoehybrid": dict(
        intermediate_size=64,
        num_local_experts=8,
        num_experts_per_tok=4,
        shared_intermediate_size=64,
        layer_types=["mamba", "mamba", "attention"],
        mamba_n_heads=8,
        mamba_d_state=16,
        mamba_d_head=16,
        mamba_chunk_size=16,
    ),
    "hunyuan_v1_moe": dict(intermediate_size=64, num_experts=8, moe_topk=4, head_dim=16),
    "jamba": dict(
        intermediate_size=64,
        num_experts=8,
        num_experts_per_tok=4,
        num_hidden_layers=4,
        mamba_d_state=8,
        expert_layer_period=2,
        expert_layer_offset=1,
        attn_layer_period=4,
        attn_layer_offset=2,
    ),
    "nemotron_h": dict(
        layers_block_type=["mamba", "moe", "attention", "moe"],
        num_hidden_layers=4,
        head_dim=16,
        intermediate_size=96,
        ssm_state_size=16,
        mamba_num_heads=8,
        mamba_head_dim=16,
        n_groups=2,
        chunk_size=16,
        n_routed_experts=8,
        moe_intermediate_size=64,
        moe_shared_expert_intermediate_size=64,
        num_experts_per_tok=4,
    ),
    "bailing_hybrid": dict(
        SMALL,
        **{**LATENT, "q_lora_rank": 32},
        num_local_experts=8,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        head_dim=16,
        layer_group_size=3,
    ),
    "glm4_moe_lite": dict(SMALL, **{**LATENT, "q_lora_rank": 32}, n_routed_experts=8),
    "deepseek_v32": dict(
        SMALL,
        **{**LATENT, "q_lora_rank": 32},
        **INDEXED,
        n_routed_experts=8,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        head_dim=16,
    ),
    "exaone_moe": dict(
        SMALL, num_experts=8, num_shared_experts=1, sliding_window=12, sliding_window_pattern=3, n_group=2, topk_group=1
    ),
    "inkling_text": dict(
        SMALL,
        head_dim=16,
        swa_num_attention_heads=4,
        swa_num_key_value_heads=2,
        swa_head_dim=16,
        sliding_window_size=12,
        n_routed_experts=8,
        rel_extent=32,
    ),
}


def random_model(arch: str, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any) -> Any:
    """A random model of `arch`: a key of ARCHITECTURES, EXTRA or MORE, or any model type, then as tests.architectures
    makes it small."""
    torch.manual_seed(seed)
    named = (ARCHITECTURES | EXTRA | MORE).get(arch)
    fields = (tiny(arch) if named is None else COMMON | named) | overrides
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(arch, **fields), dtype=dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0, 0.08)
            elif "bias" in name:
                parameter.normal_(0, 0.05)
        for name, buffer in model.named_buffers():
            if "correction_bias" in name:
                buffer.normal_(0, 0.05)
    return model


def make_checkpoint(
    arch: str,
    directory: Path,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "600KB",
    **overrides: Any,
) -> Path:
    """Write a random checkpoint of `arch` to `directory` and return it."""
    random_model(arch, seed, dtype, **overrides).save_pretrained(directory, max_shard_size=max_shard_size)
    return directory
