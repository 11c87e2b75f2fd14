"""Configs of the supported GGUF architectures: one function each, from llama.cpp's metadata to transformers' config.

Meaning of the keys: llama.cpp's conversion/*.py (which writes them) and src/models/*.cpp (which uses them). Every
function raises ModelError for models that cannot be converted.
"""

from collections.abc import Mapping
from typing import Any

from core.errors import ModelError
from core.importing.sources.gguf import config_parts as c
from core.importing.sources.gguf.facts import ModelMetadata
from core.importing.sources.gguf.layout import BLOCK_SPARSE, BY_NUMBER, ExpertLayout, Names, heads_unpaired, joined
from core.importing.sources.gguf.tensors import Merge, TensorRecipe, TensorRows
from core.system.gguf import TensorInfo


def unpaired(facts: ModelMetadata) -> dict[str, Merge]:
    """Conversions of queries and keys whose rows llama.cpp's converter permutes."""
    heads = facts.need("attention.head_count")
    shared = max(facts.by_layer("attention.head_count_kv", heads))  # 0 in layers without attention
    return {"attn_q": heads_unpaired(heads), "attn_k": heads_unpaired(shared)}


def mixtral_names(facts: ModelMetadata) -> Names:
    return Names(BLOCK_SPARSE, experts=BY_NUMBER, merges=unpaired(facts))


def mixtral(facts: ModelMetadata) -> dict[str, Any]:
    return c.common(facts, "mixtral", "MixtralForCausalLM") | {
        "head_dim": c.head_dim(facts),
        "num_local_experts": c.experts(facts),
        "intermediate_size": facts.expert_size(),
        "sliding_window": None,
    }


def qwen2_moe(facts: ModelMetadata) -> dict[str, Any]:
    c.scored(facts, c.SOFTMAX)
    shared = facts.shape(f"blk.{facts.moe_layers[0]}.ffn_down_shexp.weight")[-1]
    return c.common(facts, "qwen2_moe", "Qwen2MoeForCausalLM") | {
        **_qwen_experts(facts),
        "shared_expert_intermediate_size": shared,
        "qkv_bias": facts.has("attn_q.bias"),
        "norm_topk_prob": bool(facts.get("expert_weights_norm", False)),
    }


def qwen3_moe(facts: ModelMetadata) -> dict[str, Any]:
    c.scored(facts, c.SOFTMAX)
    return c.common(facts, "qwen3_moe", "Qwen3MoeForCausalLM") | {
        **_qwen_experts(facts),
        "head_dim": c.head_dim(facts),
        "norm_topk_prob": bool(facts.get("expert_weights_norm", True)),
    }  # llama.cpp's default without the key


def _qwen_experts(facts: ModelMetadata) -> dict[str, Any]:
    return {
        "num_experts": c.experts(facts),
        "moe_intermediate_size": facts.expert_size(),
        "decoder_sparse_step": 1,
        "intermediate_size": c.dense_size(facts),
        "use_sliding_window": False,
        "mlp_only_layers": sorted(set(range(facts.layers)) - set(facts.moe_layers)),
    }


def olmoe(facts: ModelMetadata) -> dict[str, Any]:
    return c.common(facts, "olmoe", "OlmoeForCausalLM") | {
        "num_experts": c.experts(facts),
        "intermediate_size": facts.expert_size(),
        "norm_topk_prob": bool(facts.get("expert_weights_norm", False)),
    }


def granite(facts: ModelMetadata) -> dict[str, Any]:
    if facts.get("rope.scaling.finetuned", True) is False:
        raise ModelError(
            "This GGUF model works without rotary embedding, which its architecture does not have in "
            "transformers. Import the model's safetensors version instead."
        )
    shared = facts.shape("blk.0.ffn_down_shexp.weight")[-1] if facts.has("ffn_down_shexp.weight") else 0
    kind = ("granitemoeshared", "GraniteMoeSharedForCausalLM") if shared else ("granitemoe", "GraniteMoeForCausalLM")
    return (
        c.common(facts, *kind)
        | {
            **multipliers(facts),
            "num_local_experts": c.experts(facts),
            "intermediate_size": facts.expert_size(),
        }
        | ({"shared_intermediate_size": shared} if shared else {})
    )


def granite_names(facts: ModelMetadata) -> Names:
    return Names(
        {"ffn_gate_inp": "block_sparse_moe.router.layer", "ffn_down_shexp": "shared_mlp.output_linear"},
        experts=ExpertLayout("block_sparse_moe.input_linear.weight", "", "block_sparse_moe.output_linear.weight"),
        merges=unpaired(facts),
        more=_granite_shared,
    )


def _granite_shared(entries: Mapping[str, TensorInfo], prefix: str) -> dict[str, TensorRecipe]:
    stored = [f"{prefix}ffn_{part}_shexp.weight" for part in ("gate", "up")]
    if stored[0] not in entries:
        return {}
    out, columns = entries[stored[0]].shape
    return {
        "shared_mlp.input_linear.weight": TensorRecipe(tuple(TensorRows(s) for s in stored), (2 * out, columns), joined)
    }


def multipliers(facts: ModelMetadata) -> dict[str, Any]:
    """Granite's scales."""
    return {
        "attention_multiplier": facts.get("attention.scale", c.head_dim(facts) ** -0.5),
        "embedding_multiplier": facts.get("embedding_scale", 1.0),
        "residual_multiplier": facts.get("residual_scale", 1.0),
        "logits_scaling": facts.get("logit_scale", 1.0),
    }


def gpt_oss(facts: ModelMetadata) -> dict[str, Any]:
    window = facts.need("attention.sliding_window")
    kinds = ["full_attention" if n % 2 else "sliding_attention" for n in range(facts.layers)]
    config = c.common(facts, "gpt_oss", "GptOssForCausalLM") | {
        "head_dim": c.head_dim(facts),
        "num_local_experts": c.experts(facts),
        "intermediate_size": facts.expert_size(),
        "sliding_window": window,
        "layer_types": kinds,
        "attention_bias": True,
    }
    if config["rope_parameters"]["rope_type"] == "yarn":  # true for all models of this kind; metadata has no key for it
        config["rope_parameters"] |= {"truncate": False}
    return config


def glm4_moe(facts: ModelMetadata) -> dict[str, Any]:
    c.scored(facts, c.SIGMOID)
    config = c.common(facts, "glm4_moe", "Glm4MoeForCausalLM")
    width = c.head_dim(facts)
    config["rope_parameters"] |= {"partial_rotary_factor": facts.need("rope.dimension_count") / width}
    return config | {
        **grouped(facts),
        "head_dim": width,
        "attention_bias": facts.has("attn_q.bias"),
        "use_qk_norm": facts.has("attn_q_norm.weight"),
        "num_nextn_predict_layers": 0,
    }


def dots1(facts: ModelMetadata) -> dict[str, Any]:
    c.scored(facts, c.SIGMOID)
    return c.common(facts, "dots1", "Dots1ForCausalLM") | {
        **grouped(facts),
        "head_dim": c.head_dim(facts),
        "sliding_window": None,
        "layer_types": ["full_attention"] * facts.layers,
    }


def grouped(facts: ModelMetadata, default_groups: tuple[int, int] = (1, 1)) -> dict[str, Any]:
    """Config of routed experts in the manner of DeepSeek-V3. `default_groups`: groups and chosen groups where the
    file has none."""
    return {
        "n_routed_experts": c.experts(facts),
        "moe_intermediate_size": facts.expert_size(),
        "n_shared_experts": c.shared_experts(facts),
        "first_k_dense_replace": facts.dense_lead,
        "intermediate_size": c.dense_size(facts),
        **routing(facts, default_groups),
    }


def routing(facts: ModelMetadata, default_groups: tuple[int, int] = (1, 1)) -> dict[str, Any]:
    """How experts are chosen and weighed, in the manner of DeepSeek-V3. `default_groups` as for `grouped`."""
    return {
        "routed_scaling_factor": facts.get("expert_weights_scale") or 1.0,
        "norm_topk_prob": bool(facts.get("expert_weights_norm", False)),
        "n_group": facts.get("expert_group_count") or default_groups[0],
        "topk_group": facts.get("expert_group_used_count") or default_groups[1],
    }


def ernie(facts: ModelMetadata) -> dict[str, Any]:
    c.scored(facts, c.SOFTMAX)
    config = c.common(facts, "ernie4_5_moe", "Ernie4_5_MoeForCausalLM")
    step = facts.get("interleave_moe_layer_step", 1)
    if facts.moe_layers != [n for n in range(facts.layers) if n >= facts.moe_layers[0] and (n + 1) % step == 0]:
        raise ModelError("This GGUF model's layers with experts are not where its metadata says. Download it again.")
    return config | {
        "moe_num_experts": c.experts(facts),
        "moe_k": config.pop("num_experts_per_tok"),
        "moe_intermediate_size": facts.expert_size(),
        "intermediate_size": c.dense_size(facts),
        "moe_num_shared_experts": c.shared_experts(facts),
        "moe_layer_start_index": facts.moe_layers[0],
        "moe_layer_end_index": facts.layers - 1,
        "moe_layer_interval": step,
        "head_dim": c.head_dim(facts),
    }


def minimax(facts: ModelMetadata) -> dict[str, Any]:
    c.scored(facts, c.SIGMOID)
    config = c.common(facts, "minimax_m2", "MiniMaxM2ForCausalLM")
    width, rotated = c.head_dim(facts), facts.need("rope.dimension_count")
    config["rope_parameters"] |= {"partial_rotary_factor": rotated / width}
    return config | {
        "head_dim": width,
        "rotary_dim": rotated,
        "num_local_experts": c.experts(facts),
        "intermediate_size": facts.expert_size(),
    }


def lfm2_moe(facts: ModelMetadata) -> dict[str, Any]:
    c.scored(facts, c.SIGMOID)
    config = c.common(facts, "lfm2_moe", "Lfm2MoeForCausalLM")
    kinds = ["full_attention" if heads else "conv" for heads in facts.by_layer("attention.head_count_kv")]
    return config | {
        "norm_eps": config.pop("rms_norm_eps"),
        "layer_types": kinds,
        "num_experts": c.experts(facts),
        "moe_intermediate_size": facts.expert_size(),
        "intermediate_size": c.dense_size(facts),
        "num_dense_layers": facts.dense_lead,
        "conv_L_cache": facts.need("shortconv.l_cache"),
        "conv_bias": False,
        "use_expert_bias": facts.has("exp_probs_b.bias"),
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
    }
