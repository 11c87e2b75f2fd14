"""The metadata keys that llama.cpp's converter writes for each architecture."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import gguf

ARCH = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}


PLAIN_KEYS = {  # gguf writer's method -> where transformers' configs have the number
    "add_context_length": ["max_position_embeddings"],
    "add_embedding_length": ["hidden_size"],
    "add_feed_forward_length": ["intermediate_size"],
    "add_head_count": ["num_attention_heads"],
    "add_head_count_kv": ["num_key_value_heads"],
    "add_layer_norm_rms_eps": ["rms_norm_eps", "norm_eps"],
    "add_expert_count": ["num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"],
    "add_expert_used_count": ["num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts"],
    "add_expert_group_count": ["n_group"],
    "add_expert_group_used_count": ["topk_group"],
    "add_key_length": ["head_dim"],
    "add_value_length": ["head_dim"],
    "add_expert_feed_forward_length": ["moe_intermediate_size"],
    "add_vocab_size": ["vocab_size"],
}


def layers_of(config: dict[str, Any]) -> int:
    if "layers_block_type" in config:
        return len(config["layers_block_type"])
    count: int = config.get("num_hidden_layers") or config["n_layers"]
    return count


def add_metadata(writer: gguf.GGUFWriter, ggml: str, config: dict[str, Any]) -> None:
    """The keys that llama.cpp's converter writes for this architecture."""
    if ggml == "dbrx":
        config = {**config, **_dbrx_names(config)}
    writer.add_block_count(config["num_hidden_layers"])
    if ggml == "lfm2moe":
        kv = config["num_key_value_heads"]
        config = {**config, "num_key_value_heads": [kv * (kind != "conv") for kind in config["layer_types"]]}
    if ggml == "deepseek2":
        config = {**config, "num_key_value_heads": 1, "head_dim": None}
    if ggml == "gemma4":
        config = {**config, **_gemma4_heads(config)}
    if ggml == "llama4":
        inner = {
            "intermediate_size": config["intermediate_size_mlp"],
            "moe_intermediate_size": config["intermediate_size"],
        }
        config = {**config, **inner}
    for method, names in PLAIN_KEYS.items():
        value = next((config[n] for n in names if config.get(n) is not None), None)
        if value is not None:
            getattr(writer, method)(value)
    rope = config["rope_parameters"].get("full_attention", config["rope_parameters"])
    stretched = config.get("head_dim") and rope.get("alpha", 1.0) ** (config["head_dim"] / (config["head_dim"] - 2))
    writer.add_rope_freq_base(rope["rope_theta"] * (stretched or 1.0))
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    turned = {
        "deepseek2": config.get("qk_rope_head_dim"),
        "minimax-m2": config.get("rotary_dim"),
        "glm4moe": int(dim * rope.get("partial_rotary_factor", 0.5)),
        **dict.fromkeys(("qwen35moe", "qwen3next"), int(dim * rope.get("partial_rotary_factor", 0.25))),
        "bailingmoe2": int(dim * rope.get("partial_rotary_factor", 1.0)),
    }
    writer.add_rope_dimension_count(turned.get(ggml) or dim)
    for token in ("bos", "eos", "pad"):
        if config.get(f"{token}_token_id") is not None:
            getattr(writer, f"add_{token}_token_id")(config[f"{token}_token_id"])
    OWN.get(ggml, lambda writer, config: None)(writer, config)


def _qwen2(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])


def _granite(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_attention_scale(config["attention_multiplier"])
    writer.add_embedding_scale(config["embedding_multiplier"])
    writer.add_residual_scale(config["residual_multiplier"])
    writer.add_logit_scale(config["logits_scaling"])
    if config.get("shared_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(config["shared_intermediate_size"])


def _grouped(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    if config["norm_topk_prob"]:
        writer.add_expert_weights_norm(True)
    if config["model_type"] != "deepseek_v2":
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def _deepseek(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    _grouped(writer, config)
    rank, rotated = config["kv_lora_rank"], config["qk_rope_head_dim"]
    if config["q_lora_rank"]:
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_kv_lora_rank(rank)
    writer.add_key_length(rank + rotated)
    writer.add_value_length(rank)
    writer.add_key_length_mla(config["qk_nope_head_dim"] + rotated)
    writer.add_value_length_mla(config["v_head_dim"])
    if "mscale_all_dim" in config["rope_parameters"]:
        writer.add_rope_scaling_yarn_log_mul(0.1 * config["rope_parameters"]["mscale_all_dim"])


def _ernie(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_interleave_moe_layer_step(config["moe_layer_interval"])
    writer.add_leading_dense_block_count(config["moe_layer_start_index"])
    writer.add_expert_shared_count(config["moe_num_shared_experts"])
    writer.add_expert_shared_feed_forward_length(config["moe_num_shared_experts"] * config["moe_intermediate_size"])


def _gpt_oss(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_sliding_window(config["sliding_window"])
    writer.add_expert_feed_forward_length(config["intermediate_size"])


def _minimax(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_expert_feed_forward_length(config["intermediate_size"])
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def _lfm2(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_leading_dense_block_count(config["num_dense_layers"])
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_shortconv_l_cache(config["conv_L_cache"])


def _linear(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
    writer.add_ssm_inner_size(config["linear_value_head_dim"] * config["linear_num_value_heads"])
    writer.add_full_attention_interval(4)
    if config["model_type"] == "qwen3_5_moe_text":
        writer.add_rope_dimension_sections([11, 11, 10, 0])


def _gemma4_heads(config: dict[str, Any]) -> dict[str, Any]:
    sliding = [kind == "sliding_attention" for kind in config["layer_types"]]
    heads = config["num_key_value_heads"]
    if full := config.get("num_global_key_value_heads"):
        heads = [heads if is_sliding else full for is_sliding in sliding]
    return {"head_dim": config["global_head_dim"], "head_dim_swa": config["head_dim"], "num_key_value_heads": heads}


def _gemma4(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_shared_kv_layers(0)
    writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"])
    writer.add_sliding_window(config["sliding_window"])
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
    writer.add_key_length_swa(config["head_dim_swa"])
    writer.add_value_length_swa(config["head_dim_swa"])
    writer.add_rope_dimension_count_swa(config["head_dim_swa"])
    writer.add_rope_freq_base_swa(config["rope_parameters"]["sliding_attention"]["rope_theta"])
    if config["final_logit_softcapping"]:
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])


def _llama4(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_interleave_moe_layer_step(config["interleave_moe_layer_step"])
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def _hunyuan(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_expert_feed_forward_length(config["intermediate_size"])
    writer.add_expert_shared_feed_forward_length(config["intermediate_size"])
    writer.add_expert_shared_count(1)
    writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
    writer.add_rope_scaling_factor(1)


def _exaone(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    _grouped(writer, {"n_shared_experts": config["num_shared_experts"], **config})
    writer.add_sliding_window(config["sliding_window"])
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
    writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)


def _phi(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_sliding_window(config["sliding_window"] or 0)
    if original := config["rope_parameters"].get("original_max_position_embeddings"):
        ratio = config["max_position_embeddings"] / original
        writer.add_rope_scaling_orig_ctx_len(original)
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(ratio) / math.log(original)))


def _afmoe(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_expert_shared_count(config["num_shared_experts"])
    writer.add_leading_dense_block_count(config["num_dense_layers"])
    writer.add_expert_weights_norm(True)
    writer.add_expert_weights_scale(config["route_scale"])
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_sliding_window(config["sliding_window"])


def _dbrx_names(config: dict[str, Any]) -> dict[str, Any]:
    attention, experts = config["attn_config"], config["ffn_config"]
    return {
        "num_hidden_layers": config["n_layers"],
        "max_position_embeddings": config["max_seq_len"],
        "hidden_size": config["d_model"],
        "intermediate_size": experts["ffn_hidden_size"],
        "num_attention_heads": config["n_heads"],
        "num_key_value_heads": attention["kv_n_heads"],
        "num_experts": experts["moe_num_experts"],
        "num_experts_per_tok": experts["moe_top_k"],
    }


def _dbrx(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_clamp_kqv(config["attn_config"]["clip_qkv"])
    writer.add_layer_norm_eps(1e-5)


OWN: dict[str, Callable[[gguf.GGUFWriter, dict[str, Any]], None]] = {
    "qwen2moe": _qwen2,
    "granitemoe": _granite,
    "glm4moe": _grouped,
    "dots1": _grouped,
    "deepseek2": _deepseek,
    "ernie4_5-moe": _ernie,
    "gpt-oss": _gpt_oss,
    "minimax-m2": _minimax,
    "lfm2moe": _lfm2,
    "qwen35moe": _linear,
    "qwen3next": _linear,
    "gemma4": _gemma4,
    "llama4": _llama4,
    "hunyuan-moe": _hunyuan,
    "bailingmoe2": _grouped,
    "exaone-moe": _exaone,
    "phimoe": _phi,
    "afmoe": _afmoe,
    "dbrx": _dbrx,
}
