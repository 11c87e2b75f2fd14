"""The supported GGUF architectures: ggml's name -> config and tensor names in transformers.

Meaning of the keys: llama.cpp's conversion/*.py (which writes them) and src/models/*.cpp (which uses them).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from core.errors import ModelError
from core.importing.sources.gguf import config as c
from core.importing.sources.gguf.facts import Facts
from core.importing.sources.gguf.header import Entry
from core.importing.sources.gguf.layout import (
    DENSE,
    OUTER,
    QK_NORM,
    SHARED,
    Experts,
    Names,
    as_kernel,
    as_row,
    heads_unpaired,
    joined,
    turned,
    woven,
)
from core.importing.sources.gguf.tensors import Piece, Recipe

BLOCK_SPARSE = {"ffn_gate_inp": "block_sparse_moe.gate"}
BY_NUMBER = Experts(
    "block_sparse_moe.experts.{}.w1.weight",
    "block_sparse_moe.experts.{}.w3.weight",
    "block_sparse_moe.experts.{}.w2.weight",
)
CORRECTION = {"exp_probs_b": "mlp.gate.e_score_correction_bias"}
QKV = frozenset({"attn_q", "attn_k", "attn_v"})
ONE_SHARED = {name: target.replace("experts", "expert") for name, target in SHARED.items()}
MLA = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
}


LFM2 = {
    "attn_norm": "operator_norm",
    "ffn_norm": "ffn_norm",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
    "ffn_gate_inp": "feed_forward.gate",
    "exp_probs_b": "feed_forward.expert_bias",
    **{f"shortconv.{part}": f"conv.{part}" for part in ("conv", "in_proj", "out_proj")},
}


@dataclass(frozen=True)
class Architecture:
    """`config` raises ModelError for models of this architecture that cannot be converted."""

    config: Callable[[Facts], dict[str, Any]]
    names: Callable[[Facts], Names]


def _mixtral(facts: Facts) -> dict[str, Any]:
    return c.common(facts, "mixtral", "MixtralForCausalLM") | {
        "head_dim": c.head_dim(facts),
        "num_local_experts": c.experts(facts),
        "intermediate_size": facts.expert_size(),
        "sliding_window": None,
    }


def _unpaired(facts: Facts) -> dict[str, Any]:
    heads = facts.need("attention.head_count")
    return {"attn_q": heads_unpaired(heads), "attn_k": heads_unpaired(facts.get("attention.head_count_kv", heads))}


def _qwen2_moe(facts: Facts) -> dict[str, Any]:
    c.scored(facts, c.SOFTMAX)
    shared = facts.shape(f"blk.{facts.moe_layers[0]}.ffn_down_shexp.weight")[-1]
    return c.common(facts, "qwen2_moe", "Qwen2MoeForCausalLM") | {
        **_qwen_experts(facts),
        "shared_expert_intermediate_size": shared,
        "qkv_bias": facts.has("attn_q.bias"),
        "norm_topk_prob": bool(facts.get("expert_weights_norm", False)),
    }


def _qwen3_moe(facts: Facts) -> dict[str, Any]:
    c.scored(facts, c.SOFTMAX)
    return c.common(facts, "qwen3_moe", "Qwen3MoeForCausalLM") | {
        **_qwen_experts(facts),
        "head_dim": c.head_dim(facts),
        "norm_topk_prob": bool(facts.get("expert_weights_norm", True)),
    }  # llama.cpp's default without the key


def _qwen_experts(facts: Facts) -> dict[str, Any]:
    return {
        "num_experts": c.experts(facts),
        "moe_intermediate_size": facts.expert_size(),
        "decoder_sparse_step": 1,
        "intermediate_size": c.dense_size(facts),
        "use_sliding_window": False,
        "mlp_only_layers": sorted(set(range(facts.layers)) - set(facts.moe_layers)),
    }


def _olmoe(facts: Facts) -> dict[str, Any]:
    return c.common(facts, "olmoe", "OlmoeForCausalLM") | {
        "num_experts": c.experts(facts),
        "intermediate_size": facts.expert_size(),
        "norm_topk_prob": bool(facts.get("expert_weights_norm", False)),
    }


def _granite(facts: Facts) -> dict[str, Any]:
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
            "num_local_experts": c.experts(facts),
            "intermediate_size": facts.expert_size(),
            "attention_multiplier": facts.get("attention.scale", c.head_dim(facts) ** -0.5),
            "embedding_multiplier": facts.get("embedding_scale", 1.0),
            "residual_multiplier": facts.get("residual_scale", 1.0),
            "logits_scaling": facts.get("logit_scale", 1.0),
        }
        | ({"shared_intermediate_size": shared} if shared else {})
    )


def _granite_shared(entries: Mapping[str, Entry], prefix: str) -> dict[str, Recipe]:
    stored = [f"{prefix}ffn_{part}_shexp.weight" for part in ("gate", "up")]
    if stored[0] not in entries:
        return {}
    out, columns = entries[stored[0]].shape
    return {"shared_mlp.input_linear.weight": Recipe(tuple(Piece(s) for s in stored), (2 * out, columns), joined)}


def _gpt_oss(facts: Facts) -> dict[str, Any]:
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


def _glm4_moe(facts: Facts) -> dict[str, Any]:
    c.scored(facts, c.SIGMOID)
    config = c.common(facts, "glm4_moe", "Glm4MoeForCausalLM")
    width = c.head_dim(facts)
    config["rope_parameters"] |= {"partial_rotary_factor": facts.need("rope.dimension_count") / width}
    return config | {
        **_grouped(facts),
        "head_dim": width,
        "attention_bias": facts.has("attn_q.bias"),
        "use_qk_norm": facts.has("attn_q_norm.weight"),
        "num_nextn_predict_layers": 0,
    }


def _dots1(facts: Facts) -> dict[str, Any]:
    c.scored(facts, c.SIGMOID)
    return c.common(facts, "dots1", "Dots1ForCausalLM") | {
        **_grouped(facts),
        "head_dim": c.head_dim(facts),
        "sliding_window": None,
        "layer_types": ["full_attention"] * facts.layers,
    }


def _grouped(facts: Facts) -> dict[str, Any]:
    """Config of routed experts in the manner of DeepSeek-V3."""
    known = GROUPS.get(c.experts(facts), (1, 1)) if facts.architecture == "deepseek2" else (1, 1)
    return {
        "n_routed_experts": c.experts(facts),
        "moe_intermediate_size": facts.expert_size(),
        "n_shared_experts": c.shared_experts(facts),
        "first_k_dense_replace": facts.dense_lead,
        "intermediate_size": c.dense_size(facts),
        "routed_scaling_factor": facts.get("expert_weights_scale") or 1.0,
        "norm_topk_prob": bool(facts.get("expert_weights_norm", False)),
        "n_group": facts.get("expert_group_count") or known[0],
        "topk_group": facts.get("expert_group_used_count") or known[1],
    }


GROUPS = {160: (8, 3), 256: (8, 4)}
"""By number of experts: groups and chosen groups of DeepSeek-V2 and V3, whose files before October 2025 do not say."""


def _deepseek(facts: Facts) -> dict[str, Any]:
    is_v3 = facts.has("exp_probs_b.bias") or facts.get("expert_gating_func") == c.SIGMOID
    c.scored(facts, c.SIGMOID if is_v3 else c.SOFTMAX)
    kind = ("deepseek_v3", "DeepseekV3ForCausalLM") if is_v3 else ("deepseek_v2", "DeepseekV2ForCausalLM")
    config = c.common(facts, *kind) | _grouped(facts)
    heads, rotated = config["num_attention_heads"], facts.need("rope.dimension_count")
    key = facts.get("attention.key_length_mla") or facts.need("attention.key_length")
    value = facts.get("attention.value_length_mla") or facts.need("attention.value_length")
    q_rank = "blk.0.attn_q_a.weight"
    config |= {
        "num_key_value_heads": heads,
        "kv_lora_rank": facts.need("attention.kv_lora_rank"),
        "q_lora_rank": facts.shape(q_rank)[0] if q_rank in facts.entries else None,
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": key - rotated,
        "v_head_dim": value,
    }
    if config["rope_parameters"]["rope_type"] == "yarn" and (log := facts.get("rope.scaling.yarn_log_multiplier")):
        scale = round(log * 10, 6)  # llama.cpp stores a tenth of mscale_all_dim, and takes mscale to be the same
        config["rope_parameters"] |= {"mscale": scale, "mscale_all_dim": scale}
    if is_v3:
        return config | {"rope_interleave": True, "num_nextn_predict_layers": 0}
    c.normed(facts, False)
    return config | {"topk_method": "greedy" if config["n_group"] == 1 else "group_limited_greedy"}


def _kv_b(entries: Mapping[str, Entry], prefix: str) -> dict[str, Recipe]:
    """Up-projections of keys and values, which newer files store separately: k [heads, rank, nope],
    v [heads, v, rank]."""
    stored = [f"{prefix}attn_{part}_b.weight" for part in ("k", "v")]
    if f"{prefix}attn_kv_b.weight" in entries or not all(name in entries for name in stored):
        return {}

    def merge(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat((pieces[0].transpose(1, 2), pieces[1]), dim=1).flatten(0, 1)

    heads, rank, nope = entries[stored[0]].shape
    shape = (heads * (nope + entries[stored[1]].shape[1]), rank)
    return {"self_attn.kv_b_proj.weight": Recipe(tuple(Piece(s) for s in stored), shape, merge)}


def _ernie(facts: Facts) -> dict[str, Any]:
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


def _minimax(facts: Facts) -> dict[str, Any]:
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


def _lfm2_moe(facts: Facts) -> dict[str, Any]:
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


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(_mixtral, lambda f: Names(BLOCK_SPARSE, experts=BY_NUMBER, merges=_unpaired(f))),
    "qwen2moe": Architecture(
        _qwen2_moe,
        lambda f: Names(
            DENSE | ONE_SHARED | {"ffn_gate_inp_shexp": "mlp.shared_expert_gate"},
            biases=QKV,
            merges={"ffn_gate_inp_shexp": as_row},
        ),
    ),
    "qwen3moe": Architecture(_qwen3_moe, lambda f: Names(DENSE | QK_NORM)),
    "olmoe": Architecture(_olmoe, lambda f: Names(QK_NORM)),
    "granitemoe": Architecture(
        _granite,
        lambda f: Names(
            {"ffn_gate_inp": "block_sparse_moe.router.layer", "ffn_down_shexp": "shared_mlp.output_linear"},
            experts=Experts("block_sparse_moe.input_linear.weight", "", "block_sparse_moe.output_linear.weight"),
            merges=_unpaired(f),
            more=_granite_shared,
        ),
    ),
    "gpt-oss": Architecture(
        _gpt_oss,
        lambda f: Names(
            {
                "ffn_gate_inp": "mlp.router",
                "attn_sinks": "self_attn.sinks",
                "post_attention_norm": "post_attention_layernorm",
            },
            experts=Experts("mlp.experts.gate_up_proj", "", "mlp.experts.down_proj", woven, turned),
            biases=QKV | {"attn_output", "ffn_gate_inp"},
        ),
    ),
    "glm4moe": Architecture(
        _glm4_moe,
        lambda f: Names(
            DENSE | QK_NORM | SHARED | CORRECTION | {"post_attention_norm": "post_attention_layernorm"},
            biases=QKV | set(CORRECTION),
        ),
    ),
    "dots1": Architecture(_dots1, lambda f: Names(DENSE | QK_NORM | SHARED | CORRECTION, biases=frozenset(CORRECTION))),
    "deepseek2": Architecture(
        _deepseek,
        lambda f: Names(
            DENSE | SHARED | CORRECTION | MLA,
            biases=frozenset(CORRECTION),
            more=_kv_b,
            ignored=frozenset({"attn_k_b", "attn_v_b"}),
        ),
    ),
    "ernie4_5-moe": Architecture(
        _ernie,
        lambda f: Names(
            DENSE | SHARED | {"exp_probs_b": "mlp.moe_statics.e_score_correction_bias"},
            biases=frozenset(CORRECTION),
            merges={"exp_probs_b": as_row},
        ),
    ),
    "lfm2moe": Architecture(
        _lfm2_moe,
        lambda f: Names(
            LFM2,
            {**OUTER, "token_embd_norm": "model.embedding_norm", "output_norm": "model.embedding_norm"},
            Experts(
                "feed_forward.experts.{}.w1.weight",
                "feed_forward.experts.{}.w3.weight",
                "feed_forward.experts.{}.w2.weight",
            ),
            frozenset(CORRECTION),
            {"shortconv.conv": as_kernel},
        ),
    ),
    "minimax-m2": Architecture(
        _minimax,
        lambda f: Names(
            BLOCK_SPARSE | QK_NORM | {"exp_probs_b": "block_sparse_moe.e_score_correction_bias"},
            experts=BY_NUMBER,
            biases=frozenset(CORRECTION),
        ),
    ),
}


SCALED = frozenset({"glm4moe", "dots1", "deepseek2"})  # architectures with a routed_scaling_factor


def architecture_of(facts: Facts) -> Architecture:
    """Raises ModelError for an unsupported architecture, and for a model without experts."""
    found = ARCHITECTURES.get(facts.architecture)
    if found is None:
        raise ModelError(
            f"Moestro cannot read GGUF files of the architecture {facts.architecture!r}, only of: "
            f"{', '.join(ARCHITECTURES)}. Import the model's safetensors version instead."
        )
    facts.check_layers()
    if not facts.moe_layers:
        raise ModelError(
            f"This GGUF model ({facts.architecture}) has no experts: it is not a Mixture-of-Experts "
            "model. Choose another model."
        )
    if facts.architecture != "gpt-oss" and facts.get("attention.sliding_window"):
        raise ModelError(
            "This GGUF model uses a sliding window, which its architecture does not have in transformers. "
            "Import the model's safetensors version instead."
        )
    if facts.architecture not in SCALED and facts.get("expert_weights_scale", 1) not in (0, 1):
        raise ModelError(
            "This GGUF model's router scales what experts give, which its architecture does not have in "
            "transformers. Import the model's safetensors version instead."
        )
    facts.check()
    return found
