"""The metadata keys that llama.cpp's converter writes for each architecture."""

from typing import Any

from tests.gguf_writer.own_keys import NAMES, OWN, SAME, Config, same

TOKENS = {"bos": "bos", "eos": "eos", "pad": "padding"}
UNROTATED = ("granitehybrid", "jamba", "nemotron_h_moe")
PLAIN = {  # GGUF's key -> where transformers' configs have the number
    "context_length": ["max_position_embeddings", "model_max_length"],
    "embedding_length": ["hidden_size"],
    "feed_forward_length": ["intermediate_size"],
    "vocab_size": ["vocab_size"],
    "attention.head_count": ["num_attention_heads"],
    "attention.head_count_kv": ["num_key_value_heads"],
    "attention.layer_norm_rms_epsilon": ["rms_norm_eps", "norm_eps"],
    "attention.key_length": ["head_dim"],
    "attention.value_length": ["head_dim"],
    "expert_count": ["num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"],
    "expert_used_count": ["num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k_experts"],
    "expert_group_count": ["n_group"],
    "expert_group_used_count": ["topk_group"],
    "expert_feed_forward_length": ["moe_intermediate_size"],
}


def keys(ggml: str, config: Config) -> dict[str, Any]:
    """Metadata of sizes and settings, and special tokens."""
    config = config | NAMES.get(ggml, lambda config: {})(config)
    own = (same(ggml, config) if ggml in SAME else {}) | OWN.get(ggml, lambda config: {})(config)
    found = {f"{ggml}.{key}": value for key, value in (_base(ggml, config) | own).items()}
    for token, name in TOKENS.items():
        if config.get(f"{token}_token_id") is not None:
            found[f"tokenizer.ggml.{name}_token_id"] = config[f"{token}_token_id"]
    return found


def layers_of(config: Config) -> int:
    if "layers_block_type" in config:
        return len(config["layers_block_type"])
    count: int = config.get("num_hidden_layers") or config["n_layers"]
    return count


def _base(ggml: str, config: Config) -> dict[str, Any]:
    """TextModel.set_gguf_parameters."""
    found = {"block_count": layers_of(config)}
    for key, names in PLAIN.items():
        value = next((config[name] for name in names if config.get(name) is not None), None)
        if value is not None:
            found[key] = value
    parts: Config = config.get("rope_parameters") or {}
    rope: Config = parts.get("full_attention", parts)
    if "sliding_attention" in parts:
        found["rope.freq_base_swa"] = parts["sliding_attention"]["rope_theta"]
    if "rope_theta" not in rope or ggml in UNROTATED:
        return found
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    stretched = rope.get("alpha", 1.0) ** (dim / (dim - 2)) if config.get("head_dim") else 1.0
    found["rope.freq_base"] = rope["rope_theta"] * stretched
    share = {"glm4moe": 0.5, "qwen35moe": 0.25, "qwen3next": 0.25, "bailingmoe2": 1.0, "mimo2": 1.0}.get(ggml)
    found["rope.dimension_count"] = (
        config.get("qk_rope_head_dim")
        or (config.get("rotary_dim") if ggml == "minimax-m2" else None)
        or int(dim * (rope.get("partial_rotary_factor", share) if share else 1))
    )
    if rope["rope_type"] == "yarn":
        found |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": rope["factor"],
            "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
            "rope.scaling.yarn_beta_fast": rope["beta_fast"],
            "rope.scaling.yarn_beta_slow": rope["beta_slow"],
        }
    return found
