"""What llama.cpp's converter writes for models of latent attention, of states and of sliding windows: keys and tensors.

After conversion/*.py (base, deepseek, glm, mistral3, mamba, granite, nemotron, jamba, kimi_linear, mimo); names come
from gguf's own map.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import gguf
import torch

from tests.gguf_metadata import ARCH, layers_of

Tensors = list[tuple[str, torch.Tensor]]
Config = dict[str, Any]
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
TOKENS = {"bos": "bos", "eos": "eos", "pad": "padding"}
MAPPED = {"deepseek32": "glm-dsa"}
"""Architectures that the installed gguf package does not know -> one with the same names."""


def keys(ggml: str, config: Config) -> dict[str, Any]:
    """Metadata of sizes and settings, and special tokens."""
    found = {f"{ggml}.{key}": value for key, value in (_base(config) | OWN[ggml](config)).items()}
    for token, name in TOKENS.items():
        if config.get(f"{token}_token_id") is not None:
            found[f"tokenizer.ggml.{name}_token_id"] = config[f"{token}_token_id"]
    return found


def convert(ggml: str, config: Config, key: str, tensor: torch.Tensor) -> Tensors:
    """One checkpoint tensor as llama.cpp stores it; experts still one by one."""
    if re.search(r"\.experts\.\d+\.", key):
        return [(key, tensor)]
    if key.endswith("input_linear.weight"):
        layer, kind = key.split(".")[2], "exps" if "sparse" in key else "shexp"
        gate, up = tensor.chunk(2, dim=-2)
        return [(f"blk.{layer}.ffn_gate_{kind}.weight", gate), (f"blk.{layer}.ffn_up_{kind}.weight", up)]
    if key.endswith("kv_b_proj.weight"):
        return _split_keys_and_values(config, key, tensor)
    if key.endswith("experts.gate_up_proj") and ggml == "deepseek2":  # Mistral's own format has them apart
        gate, up = tensor.chunk(2, dim=-2)
        layer = key.split(".")[2]
        return [(f"blk.{layer}.ffn_gate_exps.weight", gate), (f"blk.{layer}.ffn_up_exps.weight", up)]
    if key.endswith(("experts.gate_up_proj", "experts.down_proj")):
        key += ".weight"
    key = key.replace("e_score_correction_bias", "e_score_correction.bias")
    key += ".weight" if key.endswith("attention_sink_bias") else ""
    key = re.sub(r"block_sparse_moe\.(gate|up|down)_proj", r"mlp.\1_proj", key)  # as Kimi's own checkpoint has it
    key = re.sub(r"\.dt_bias$", ".dt.bias" if ggml == "nemotron_h_moe" else ".dt_proj.bias", key)
    if ggml == "granitehybrid" and re.search(r"self_attn\.[qk]_proj", key):  # halves to pairs
        heads = config["num_attention_heads" if ".q_proj" in key else "num_key_value_heads"]
        tensor = tensor.reshape(heads, 2, -1, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)
    return [(_mapped(ggml, config, key), _state(ggml, config, key, tensor))]


def _state(ggml: str, config: Config, key: str, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of a layer that keeps a state, as it is stored."""
    if key.endswith("_log"):
        tensor = -torch.exp(tensor)
    if ggml == "kimi-linear" and "_conv1d" in key:
        return tensor.reshape(1, tensor.shape[0], 1, tensor.shape[-1])
    if "conv1d.weight" in key:
        return tensor.squeeze()
    if ggml in ("nemotron_h_moe", "granitehybrid"):
        if key.endswith((".A_log", ".D")):
            return tensor.reshape(-1, 1)
        if key.endswith(("mixer.norm.weight", "mamba.norm.weight")):
            return tensor.reshape(_first(config, "n_groups", "mamba_n_groups"), -1)
    return tensor


def _mapped(ggml: str, config: Config, key: str) -> str:
    names = gguf.get_tensor_name_map(ARCH[MAPPED.get(ggml, ggml)], layers_of(config))
    name: str | None = names.get_name(key, try_suffixes=(".weight", ".bias"))
    assert name is not None, key
    return name


def _split_keys_and_values(config: Config, key: str, tensor: torch.Tensor) -> Tensors:
    layer = key.split(".")[2]
    parts = tensor.view(config["num_attention_heads"], -1, tensor.shape[-1])
    k, v = parts.split([config["qk_nope_head_dim"], config["v_head_dim"]], dim=1)
    return [(f"blk.{layer}.attn_k_b.weight", k.transpose(1, 2)), (f"blk.{layer}.attn_v_b.weight", v)]


def _first(config: Config, *names: str) -> Any:
    return next((config[name] for name in names if config.get(name) is not None), None)


def _base(config: Config) -> dict[str, Any]:
    """TextModel.set_gguf_parameters."""
    parts: Config = config.get("rope_parameters") or {}
    rope: Config = parts.get("full_attention", parts)
    found = {
        "block_count": layers_of(config),
        "context_length": _first(config, "max_position_embeddings", "model_max_length"),
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config.get("intermediate_size"),
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "rope.freq_base": rope.get("rope_theta"),
        "rope.freq_base_swa": parts.get("sliding_attention", {}).get("rope_theta"),
        "attention.layer_norm_rms_epsilon": _first(config, "rms_norm_eps", "norm_eps"),
        "attention.layer_norm_epsilon": config.get("layer_norm_epsilon"),
        "expert_count": _first(config, "num_local_experts", "num_experts"),
        "expert_used_count": _first(config, "num_experts_per_tok", "num_experts_per_token"),
        "expert_group_count": config.get("n_group"),
        "expert_group_used_count": config.get("topk_group"),
        "attention.key_length": config.get("head_dim"),
        "attention.value_length": config.get("head_dim"),
    }
    if rope.get("rope_type") == "yarn":
        found |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": rope["factor"],
            "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
            "rope.scaling.yarn_beta_fast": rope["beta_fast"],
            "rope.scaling.yarn_beta_slow": rope["beta_slow"],
        }
    return {name: value for name, value in found.items() if value is not None}


def _dense_lead(config: Config) -> int:
    if "first_k_dense_replace" in config:
        return int(config["first_k_dense_replace"])
    kinds: list[str] = config["mlp_layer_types"]
    return kinds.index("sparse")


def _latent(config: Config) -> dict[str, Any]:
    """DeepseekV2Model.set_gguf_parameters."""
    rank, rotated = config["kv_lora_rank"], config["qk_rope_head_dim"]
    found = {
        "attention.head_count_kv": 1,
        "leading_dense_block_count": _dense_lead(config),
        "vocab_size": config["vocab_size"],
        "attention.q_lora_rank": config["q_lora_rank"],
        "attention.kv_lora_rank": rank,
        "attention.key_length": rank + rotated,
        "attention.value_length": rank,
        "attention.key_length_mla": config["qk_nope_head_dim"] + rotated,
        "attention.value_length_mla": config["v_head_dim"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_count": config["n_routed_experts"],
        "expert_shared_count": config["n_shared_experts"],
        "expert_weights_scale": config["routed_scaling_factor"],
        "rope.dimension_count": rotated,
    }
    if config["norm_topk_prob"]:
        found["expert_weights_norm"] = True
    if config["model_type"] != "mistral4":  # config.json of the others says "scoring_func": "sigmoid"
        found["expert_gating_func"] = int(gguf.ExpertGatingFuncType.SIGMOID)
    if "mscale_all_dim" in config["rope_parameters"]:
        found["rope.scaling.yarn_log_multiplier"] = 0.1 * config["rope_parameters"]["mscale_all_dim"]
    return found


def _indexed(config: Config) -> dict[str, Any]:
    found = _latent(config) | {
        "attention.indexer.head_count": config["index_n_heads"],
        "attention.indexer.key_length": config["index_head_dim"],
        "attention.indexer.top_k": config["index_topk"],
    }
    if "indexer_types" in config:
        found["attention.indexer.types"] = [kind == "full" for kind in config["indexer_types"]]
    return found


def _mistral(config: Config) -> dict[str, Any]:
    return _latent(config) | {"attention.temperature_scale": config["rope_parameters"]["llama_4_scaling_beta"]}


def _nemotron(config: Config) -> dict[str, Any]:
    """GraniteHybridModel's, then NemotronHModel's."""
    kinds = config["layers_block_type"]
    heads, width = config["mamba_num_heads"], config["moe_intermediate_size"]
    return {
        "context_length": 1 << 20,
        "rope.scaling.finetuned": False,
        "attention.layer_norm_rms_epsilon": config["layer_norm_epsilon"],  # config.json says it as norm_eps, too
        "attention.head_count_kv": [config["num_key_value_heads"] * (kind == "full_attention") for kind in kinds],
        "feed_forward_length": [width * (kind == "moe") for kind in kinds],
        "ssm.conv_kernel": config["conv_kernel"],
        "ssm.state_size": config["ssm_state_size"],
        "ssm.group_count": config["n_groups"],
        "ssm.inner_size": heads * config["mamba_head_dim"],
        "ssm.time_step_rank": heads,
        "expert_count": config["n_routed_experts"],
        "expert_feed_forward_length": width,
        "expert_shared_feed_forward_length": config["moe_shared_expert_intermediate_size"],
        "expert_shared_count": config["n_shared_experts"],
        "expert_weights_norm": config["norm_topk_prob"],
        "expert_weights_scale": config["routed_scaling_factor"],
        "moe_latent_size": config["moe_latent_size"],
    }


def _granite(config: Config) -> dict[str, Any]:
    kinds = config["layer_types"]
    return {
        "context_length": 1 << 20,
        "rope.scaling.finetuned": False,
        "attention.scale": config["attention_multiplier"],
        "embedding_scale": config["embedding_multiplier"],
        "residual_scale": config["residual_multiplier"],
        "logit_scale": config["logits_scaling"],
        "expert_shared_feed_forward_length": config["shared_intermediate_size"],
        "attention.head_count_kv": [config["num_key_value_heads"] * (kind == "full_attention") for kind in kinds],
        "ssm.conv_kernel": config["mamba_d_conv"],
        "ssm.state_size": config["mamba_d_state"],
        "ssm.group_count": config["mamba_n_groups"],
        "ssm.inner_size": config["mamba_expand"] * config["hidden_size"],
        "ssm.time_step_rank": config["mamba_n_heads"],
    }


def _jamba(config: Config) -> dict[str, Any]:
    offset, period = config["attn_layer_offset"], config["attn_layer_period"]
    attends = [n >= offset and (n - offset) % period == 0 for n in range(config["num_hidden_layers"])]
    return {
        "attention.head_count_kv": [config["num_key_value_heads"] * here for here in attends],
        "ssm.conv_kernel": config["mamba_d_conv"],
        "ssm.inner_size": config["mamba_expand"] * config["hidden_size"],
        "ssm.state_size": config["mamba_d_state"],
        "ssm.time_step_rank": config["mamba_dt_rank"],
    }


def _mimo(config: Config) -> dict[str, Any]:
    ahead = 3
    slides = [*(int(kind == "sliding_attention") for kind in config["layer_types"]), *[1] * ahead]
    part = config["rope_parameters"]["full_attention"]["partial_rotary_factor"]
    return {
        "block_count": config["num_hidden_layers"] + ahead,
        "nextn_predict_layers": ahead,
        "attention.head_count_kv": [config["num_key_value_heads"] * (1 + here) for here in slides],
        "attention.sliding_window": config["sliding_window"],
        "attention.sliding_window_pattern": slides,
        "attention.value_length": config["v_head_dim"],
        "attention.value_scale": config["attention_value_scale"],
        "expert_count": config["n_routed_experts"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_gating_func": int(gguf.ExpertGatingFuncType.SIGMOID),
        "rope.dimension_count": int(config["head_dim"] * part),
    }


def _kimi(config: Config) -> dict[str, Any]:
    rank, rotated = config["kv_lora_rank"], config["qk_rope_head_dim"]
    return {
        "vocab_size": config["vocab_size"],
        "attention.head_count_kv": [int(kind == "full_attention") for kind in config["layer_types"]],
        "ssm.conv_kernel": config["linear_conv_kernel_dim"],
        "kda.head_dim": config["linear_head_dim"],
        "attention.kv_lora_rank": rank,
        "rope.dimension_count": rotated,
        "attention.key_length": rank + rotated,
        "attention.key_length_mla": config["qk_nope_head_dim"] + rotated,
        "attention.value_length_mla": config["v_head_dim"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_shared_count": config["num_shared_experts"],
        "leading_dense_block_count": _dense_lead(config),
        "expert_weights_scale": config["routed_scaling_factor"],
        "expert_gating_func": int(gguf.ExpertGatingFuncType.SIGMOID),
    }


OWN: dict[str, Callable[[Config], dict[str, Any]]] = {
    "deepseek2": _latent,
    "deepseek32": _indexed,
    "glm-dsa": _indexed,
    "mistral4": _mistral,
    "nemotron_h_moe": _nemotron,
    "granitehybrid": _granite,
    "jamba": _jamba,
    "mimo2": _mimo,
    "kimi-linear": _kimi,
}
