"""A tiny config of any model type: transformers' own default config, its sizes cut down by their names."""

from typing import Any

from transformers.models.auto.configuration_auto import CONFIG_MAPPING


def _sized(names_of: dict[int, str]) -> dict[str, Any]:
    """Names of fields by the size that they are given."""
    return {name: size for size, names in names_of.items() for name in names.split()}


WHERE: dict[str, Any] = dict(  # of text models
    _sized(
        {
            0: "pad_token_id",
            1: "bos_token_id n_shared_experts num_shared_experts moe_num_shared_experts first_k_dense_replace "
            "num_dense_layers topk_group",
            2: "num_key_value_heads n_group linear_num_key_heads",
            4: "num_hidden_layers num_attention_heads num_experts_per_tok moe_topk moe_k moe_top_k top_k_experts "
            "index_n_heads linear_conv_kernel_dim linear_num_value_heads",
            8: "num_experts num_local_experts n_routed_experts moe_num_experts index_topk",
            12: "sliding_window sliding_window_size",
            16: "head_dim qk_nope_head_dim qk_rope_head_dim v_head_dim index_head_dim linear_key_head_dim "
            "linear_value_head_dim",
            32: "q_lora_rank kv_lora_rank router_hidden_size",
            64: "hidden_size moe_intermediate_size shared_intermediate_size moe_shared_expert_intermediate_size",
            80: "shared_expert_intermediate_size",
            96: "intermediate_size dense_intermediate_size",
            250: "unpadded_vocab_size",
            256: "vocab_size",
            512: "max_position_embeddings",
        }
    ),
    output_router_logits=False,
    attention_dropout=0.0,
    dtype="float32",
)
VISION: dict[str, Any] = _sized(  # of everything beside the text model
    {
        1: "num_hidden_layers depth encoder_layers",
        2: "num_attention_heads num_heads num_key_value_heads encoder_attention_heads",
        3: "num_channels",
        14: "patch_size",
        16: "head_dim num_position_embeddings position_embedding_size",
        28: "image_size",
        32: "hidden_size projection_hidden_dim embed_dim d_model output_proj_dims",
        48: "intermediate_size encoder_ffn_dim",
        64: "out_hidden_size text_hidden_size output_dim vision_output_dim projector_input_dim projector_output_dim",
    }
)
LINEAR: dict[str, Any] = dict(num_hidden_layers=4, linear_head_dim=16, linear_num_heads=4)
INKLING: dict[str, Any] = dict(
    layer_types=["hybrid_sliding", "hybrid", "hybrid_sliding", "hybrid"],
    swa_num_attention_heads=4,
    swa_num_key_value_heads=2,
    swa_head_dim=16,
    rel_extent=16,
    d_rel=8,
    log_scaling_n_floor=16,
    n_layers_per_attn_res_block=2,
)
OWN: dict[str, dict[str, Any]] = {  # what the rules above do not make small, or not consistent
    "aria": dict(projector_patch_to_query_dict={"4": 4}),
    "beam": dict(mlp_layer_types=["dense", "sparse", "sparse", "sparse"]),
    "bailing_hybrid": dict(num_hidden_layers=4, layer_group_size=3),
    "dbrx": dict(
        d_model=64,
        n_heads=4,
        n_layers=3,
        max_seq_len=512,
        attn_config=dict(kv_n_heads=2, clip_qkv=8, rope_theta=10000.0),
        ffn_config=dict(hidden_size=64, ffn_hidden_size=96, moe_num_experts=8, moe_top_k=4),
    ),
    "deepseek_v2": dict(n_group=1, topk_group=1, first_k_dense_replace=1),
    "doge": dict(is_moe=True, num_experts=16, num_experts_per_tok=4, intermediate_size=96),
    "dots3_note_vision_encoder": dict(
        num_hidden_layers=42, adapter_in_dim=32, adapter_out_dim=64, moe_intermediate_size=16, num_local_experts=4
    ),
    "dots3_note_audio_encoder": dict(adapter_input_size=32, adapter_out_dim=64, downsample_hidden_size=16),
    "ernie4_5_vl_moe_text": dict(
        moe_intermediate_size=[64, 32],
        num_hidden_layers=4,
        mlp_layer_types=["dense", "sparse", "sparse", "sparse"],
        rope_parameters=dict(rope_type="default", rope_theta=5e5, mrope_section=[3, 3, 2]),
    ),
    "gemma4_text": dict(
        num_hidden_layers=3,
        enable_moe_block=True,
        vocab_size_per_layer_input=256,
        hidden_size_per_layer_input=0,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        global_head_dim=16,
    ),
    "gemma4_audio": dict(subsampling_conv_channels=[8, 8]),
    "glm4v_moe_text": dict(
        rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5, mrope_section=[2, 1, 1])
    ),
    "glm5_next_text": dict(LINEAR, index_topk=16, qk_rope_head_dim=0, head_dim=0),
    "granitemoe_swa": dict(layer_rope_theta=[0.0, 1e4, 0.0, 1e4]),  # 0: no rotation
    "granitemoehybrid": dict(
        num_hidden_layers=3,
        layer_types=["mamba", "mamba", "attention"],
        mamba_n_heads=8,
        mamba_d_state=16,
        mamba_d_head=16,
        mamba_chunk_size=16,
    ),
    "hy_v4_vl_text": dict(
        num_hidden_layers=5,
        indexer_types=["full", "full", "shared", "full", "shared"],
        rope_parameters=dict(rope_type="default", rope_theta=1e4, mrope_section=[3, 3, 2]),
    ),
    "hy_v4_vl_vision": dict(max_image_size=32, patch_size=8),
    "inkling2_loop_text": dict(
        INKLING,
        num_hidden_layers=6,
        layer_types=["hybrid_sliding", "hybrid"] * 3,
        n_layers_per_attn_res_block=2,
        loop_layer_index_start=2,
        loop_layer_index_end=4,
        loop_num_passes=3,
        loop_gate_rank=16,
    ),
    "inkling2_text": INKLING,
    "jamba": dict(
        num_hidden_layers=4,
        mamba_d_state=8,
        expert_layer_period=2,
        expert_layer_offset=1,
        attn_layer_period=4,
        attn_layer_offset=2,
    ),
    "phimoe": dict(num_experts_per_tok=2),  # as its router always chooses
    "jetmoe": dict(kv_channels=16, num_experts_per_tok=2),
    "kimi_linear": dict(LINEAR, layer_types=["linear_attention"] * 3 + ["full_attention"]),
    "lfm2_moe": dict(num_hidden_layers=3, layer_types=["conv", "conv", "full_attention"]),
    "llama4_text": dict(num_experts_per_tok=1, intermediate_size_mlp=96, attention_chunk_size=16),
    "longcat_flash": dict(num_layers=2, ffn_hidden_size=96, zero_expert_num=4, expert_ffn_hidden_size=64),
    "nemotron_h": dict(
        layers_block_type=["mamba", "moe", "attention", "moe"],
        num_hidden_layers=4,
        ssm_state_size=16,
        mamba_num_heads=8,
        mamba_head_dim=16,
        n_groups=2,
        chunk_size=16,
    ),
    "qwen3_5_moe_text": LINEAR,
    "qwen3_next": LINEAR,
    "qwen3_omni_moe_text": dict(sliding_window=None),  # its attention has none, and its cache would
    "qwen4_exp_text": dict(
        LINEAR,
        hc_lowrank=8,
        ngram_vocab_size_base=64,
        split_ngram_parts=1,
        make_ngram_vocab_size_divisible_by=8,
        indexer_n_heads=4,
        indexer_kv_heads=1,
        indexer_head_dim=16,
        indexer_budget=8,
        indexer_compress_ratio=2,
    ),
    "step3p5": dict(mlp_layer_types=["dense", "sparse", "sparse", "sparse"], share_expert_dim=64),
    "switch_transformers": dict(
        d_model=64,
        d_kv=16,
        d_ff=96,
        num_layers=4,
        num_decoder_layers=4,
        num_sparse_encoder_layers=2,
        num_sparse_decoder_layers=2,
        num_heads=4,
        expert_capacity=4,
        eos_token_id=2,
    ),
    "zaya": dict(num_experts_per_tok=1, num_hidden_layers=4),
}


SPARSE: dict[str, Any] = dict(
    layer_types=["minimax_m3_sparse", "full_attention"] * 2, index_block_size=4, index_topk_blocks=2, index_n_heads=2
)
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {  # what models of a type may have besides, and a config with it
    "gemma4_text": ("inputs of each layer", dict(hidden_size_per_layer_input=16)),
    "minimax_m3_vl_text": ("layers of sparse attention (minimax_m3_sparse)", SPARSE),
    "minimax_m3_vl": ("layers of sparse attention (minimax_m3_sparse)", {"text_config": SPARSE}),
}


def fields_of(kind: type[Any]) -> set[str]:
    """The names of a config class's fields."""
    return {name for base in kind.__mro__ for name in vars(base).get("__annotations__", {})}


def changed(model_type: str, changes: dict[str, Any]) -> dict[str, Any]:
    """Those of `tiny`, some of them others, also in configs that it nests."""
    fields = tiny(model_type)
    nested = {name: fields[name] | value for name, value in changes.items() if isinstance(value, dict)}
    return fields | changes | nested


def with_choice(fields: dict[str, Any]) -> dict[str, Any]:
    """Fields in which a token does not need a whole group of experts, so that another of it can replace one."""
    inner = {name: with_choice(value) for name, value in fields.items() if isinstance(value, dict)}
    fewer = {"num_experts_per_tok": 2} if fields.get("n_group", 1) > 1 and "num_experts_per_tok" in fields else {}
    return fields | inner | fewer


def tiny(model_type: str) -> dict[str, Any]:
    """Fields for `AutoConfig.for_model(model_type, **fields)`."""
    kind = CONFIG_MAPPING[model_type]
    text = not any(word in model_type for word in ("vision", "audio", "vit"))
    rules = WHERE if text else VISION
    fields = {name: value for name, value in rules.items() if name in fields_of(kind)}
    if "kv_lora_rank" in fields:
        fields["num_key_value_heads"] = 4  # latent attention has as many as it has heads
    for name, sub in (getattr(kind, "sub_configs", None) or {}).items():
        inner = getattr(sub, "model_type", "") or INNER.get((model_type, name), "")
        if inner in CONFIG_MAPPING and name not in OWN.get(model_type, {}):
            fields[name] = {"model_type": inner, **tiny(inner)}
    return fields | OWN.get(model_type, {})


INNER: dict[tuple[str, str], str] = {  # where a config says only that any config may stand there
    ("inkling2_loop", "vision_config"): "inkling2_vision",
    ("kimi_k25", "text_config"): "deepseek_v3",
    ("mistral3", "text_config"): "mistral4",
    ("mistral3", "vision_config"): "pixtral",
    ("mistral_large4", "vision_config"): "pixtral",
}
