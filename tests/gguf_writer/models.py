"""The architectures that are written as GGUF, each with what its tiny checkpoint is made with."""

from typing import Any

Config = dict[str, Any]
PERIOD = ["linear_attention"] * 3 + ["full_attention"]
YARN: Config = dict(
    rope_type="yarn",
    rope_theta=10000.0,
    factor=16.0,
    beta_fast=32.0,
    beta_slow=1.0,
    original_max_position_embeddings=32,
    mscale=1.0,
    mscale_all_dim=1.0,
)
UNLIKE: Config = dict(  # no two sizes are the same, and none is a default: one read for another would differ
    q_lora_rank=24, kv_lora_rank=32, qk_nope_head_dim=24, qk_rope_head_dim=16, v_head_dim=20, rms_norm_eps=3e-6
)
INDEX: Config = dict(index_n_heads=2, index_head_dim=28, index_topk=6)
ARCHITECTURES: dict[str, Config] = {
    "mixtral": dict(ggml="llama"),
    "qwen2_moe": dict(ggml="qwen2moe"),
    "qwen3_moe": dict(ggml="qwen3moe", norm_topk_prob=True),
    "olmoe": dict(ggml="olmoe"),
    "granitemoe": dict(
        ggml="granitemoe",
        attention_multiplier=0.22,
        embedding_multiplier=12.0,
        residual_multiplier=0.3,
        logits_scaling=6.0,
        tie_word_embeddings=True,
    ),
    "granitemoeshared": dict(ggml="granitemoe", attention_multiplier=0.22),
    "gpt_oss": dict(
        ggml="gpt-oss",
        max_position_embeddings=4096,
        rope_parameters=dict(
            rope_type="yarn",
            rope_theta=150000.0,
            factor=32.0,
            beta_fast=32.0,
            beta_slow=1.0,
            truncate=False,
            original_max_position_embeddings=128,
        ),
    ),
    "glm4_moe": dict(ggml="glm4moe", attention_bias=True, use_qk_norm=True, routed_scaling_factor=1.5),
    "dots1": dict(ggml="dots1", norm_topk_prob=True, routed_scaling_factor=2.5),
    "deepseek_v2": dict(ggml="deepseek2"),
    "deepseek_v3": dict(
        ggml="deepseek2",
        max_position_embeddings=4096,
        rope_parameters=dict(
            rope_type="yarn",
            rope_theta=10000.0,
            factor=40.0,
            mscale=1.0,
            mscale_all_dim=1.0,
            beta_fast=32.0,
            beta_slow=1.0,
            original_max_position_embeddings=64,
        ),
    ),
    "ernie4_5_moe": dict(ggml="ernie4_5-moe", tie_word_embeddings=True),
    "lfm2_moe": dict(ggml="lfm2moe"),
    "qwen3_5_moe_text": dict(ggml="qwen35moe", layer_types=PERIOD, num_hidden_layers=4, linear_num_value_heads=6),
    "qwen3_next": dict(ggml="qwen3next", layer_types=PERIOD, num_hidden_layers=4),
    "gemma4_text": dict(ggml="gemma4", global_head_dim=16),
    "gemma4_26b": dict(
        ggml="gemma4",
        model="gemma4_text",
        global_head_dim=32,
        attention_k_eq_v=True,
        num_global_key_value_heads=1,
        hidden_size_per_layer_input=0,
        final_logit_softcapping=30.0,
    ),
    "llama4_text": dict(
        ggml="llama4",
        interleave_moe_layer_step=2,
        attention_chunk_size=8192,
        rope_parameters=dict(
            rope_type="llama3",
            rope_theta=5e5,
            factor=16.0,
            low_freq_factor=1.0,
            high_freq_factor=1.0,
            original_max_position_embeddings=8192,
        ),
    ),
    "hunyuan_v1_moe": dict(
        ggml="hunyuan-moe", rope_parameters=dict(rope_type="dynamic", rope_theta=10000.0, alpha=1000.0, factor=1.0)
    ),
    "sarvam_moe": dict(
        ggml="bailingmoe2",
        rope_parameters=dict(rope_type="default", rope_theta=6e5, partial_rotary_factor=0.5),
        topk_group=1,
    ),
    "exaone_moe": dict(ggml="exaone-moe", num_hidden_layers=4, head_dim=16, routed_scaling_factor=1.5),
    "phimoe": dict(ggml="phimoe", attention_bias=True, lm_head_bias=True, sliding_window=24),
    "phimoe_long": dict(
        ggml="phimoe",
        model="phimoe",
        max_position_embeddings=131072,
        rope_parameters=dict(
            rope_type="longrope",
            rope_theta=10000.0,
            short_factor=[1.0, 1.25, 1.5, 1.75, 2.0, 2.25, 2.5, 2.75],
            long_factor=[1.0, 2.5, 4.0, 6.0, 8.0, 12.0, 16.0, 32.0],
            short_mscale=1.243163121016122,
            long_mscale=1.243163121016122,
            original_max_position_embeddings=4096,
        ),
    ),
    "afmoe": dict(ggml="afmoe", mup_enabled=True, route_scale=2.5),
    "dbrx": dict(ggml="dbrx"),
    "minimax_m2": dict(
        ggml="minimax-m2",
        rotary_dim=8,
        rope_parameters=dict(rope_type="default", rope_theta=5e6, partial_rotary_factor=0.5),
    ),
}
OTHERS: dict[str, Config] = {  # transformers' name -> ggml's, and what the checkpoint is made with
    "glm_moe_dsa": dict(
        UNLIKE,
        **INDEX,
        ggml="glm-dsa",
        indexer_types=["full", "full", "shared", "full"],
        routed_scaling_factor=1.5,
        n_shared_experts=2,
    ),
    "deepseek_v32": dict(UNLIKE, **INDEX, ggml="deepseek32", rope_parameters=YARN),
    "glm4_moe_lite": dict(UNLIKE, ggml="deepseek2", more={"tokenizer.ggml.pre": "glm4"}),
    "mistral4": dict(
        UNLIKE,
        ggml="mistral4",
        n_group=1,
        first_k_dense_replace=0,
        rope_parameters=dict(YARN, llama_4_scaling_beta=0.1),
    ),
    "nemotron_h": dict(
        ggml="nemotron_h_moe",
        chunk_size=128,  # transformers' default: no file says it
        routed_scaling_factor=2.5,
        sliding_window=None,
        moe_latent_size=32,
        moe_shared_expert_intermediate_size=48,
        ssm_state_size=24,
        mamba_head_dim=12,
        conv_kernel=3,
        layer_norm_epsilon=3e-6,
    ),
    "granitemoehybrid": dict(
        ggml="granitehybrid",
        attention_multiplier=0.22,
        embedding_multiplier=12.0,
        residual_multiplier=0.3,
        logits_scaling=6.0,
        shared_intermediate_size=48,
        mamba_chunk_size=256,
        mamba_n_groups=2,
        mamba_d_state=24,
        mamba_d_conv=3,
        tie_word_embeddings=True,
    ),
    "jamba": dict(ggml="jamba", mamba_d_conv=3, mamba_dt_rank=5, rms_norm_eps=3e-6),
    "mimo_v2_flash": dict(
        ggml="mimo2",
        v_head_dim=8,
        n_group=1,
        attention_value_scale=0.612,
        layer_types=["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
        rope_parameters=dict(
            full_attention=dict(rope_type="default", rope_theta=5e6, partial_rotary_factor=0.5),
            sliding_attention=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5),
        ),
    ),
    "kimi_linear": dict(
        {**UNLIKE, "q_lora_rank": None},
        ggml="kimi-linear",
        n_group=1,
        linear_head_dim=12,
        linear_conv_kernel_dim=3,
        num_shared_experts=2,
    ),
}
