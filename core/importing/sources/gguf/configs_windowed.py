"""Models whose layers of full attention stand between layers that see a window: Llama 4, EXAONE MoE, AFMoE and MiMo-V2.

In all of them but MiMo-V2 only the layers with a window rotate queries and keys.
"""

from __future__ import annotations

from typing import Any

from core.importing.sources.gguf import config_parts as c
from core.importing.sources.gguf.configs import routing
from core.importing.sources.gguf.facts import ModelMetadata
from core.importing.sources.gguf.layout import CORRECTION, DENSE, QK_NORM, SHARED, ExpertLayout, Names, joined, turned
from core.importing.sources.gguf.tensors import Merge

CHUNK = 8192
"""What llama.cpp takes to be the chunk of Llama 4's attention, which its files do not say."""
LARGEST = 128
"""Experts of the one Llama 4 that does not normalise queries and keys, by which llama.cpp knows it."""

V2_FLASH = ((48, 4096, 256), 0.707)
"""MiMo-V2-Flash: layers, width and experts, by which it is known, and the scale of its values: transformers' default,
which early files do not say."""

_llama4_pair: Merge = lambda pieces: turned([joined(pieces)])  # noqa: E731


def llama4_names(facts: ModelMetadata) -> Names:
    shared = {
        name: target.replace("mlp.shared_experts", "feed_forward.shared_expert") for name, target in SHARED.items()
    }
    dense = {name: target.replace("mlp", "feed_forward") for name, target in DENSE.items()}
    return Names(
        shared | dense | {"ffn_gate_inp": "feed_forward.router"},
        experts=ExpertLayout(
            "feed_forward.experts.gate_up_proj", "", "feed_forward.experts.down_proj", _llama4_pair, turned
        ),
    )


def llama4(facts: ModelMetadata) -> dict[str, Any]:
    c.scored(facts, c.SIGMOID)
    if facts.get("attention.sliding_window") == 0:
        raise c.refusal("rotates queries and keys in every layer")
    step = facts.get("interleave_moe_layer_step", 1)
    if facts.moe_layers != list(range(step - 1, facts.layers, step)):
        raise c.refusal("has its layers with experts not where its metadata says")
    config = c.common(facts, "llama4_text", "Llama4ForCausalLM")
    return config | {
        "head_dim": c.head_dim(facts),
        "num_local_experts": c.experts(facts),
        "intermediate_size": facts.expert_size(),
        "intermediate_size_mlp": c.dense_size(facts),
        "interleave_moe_layer_step": step,
        "attention_chunk_size": CHUNK,
        "no_rope_layer_interval": 4,
        "attn_temperature_tuning": True,
        "floor_scale": CHUNK,
        "attn_scale": 0.1,
        "use_qk_norm": c.experts(facts) != LARGEST,
    }


def exaone_names(facts: ModelMetadata) -> Names:
    return Names(
        DENSE | QK_NORM | SHARED | {"exp_probs_b": "mlp.e_score_correction_bias"}, biases=frozenset({"exp_probs_b"})
    )


def exaone(facts: ModelMetadata) -> dict[str, Any]:
    c.scored(facts, c.SIGMOID)
    return c.common(facts, "exaone_moe", "ExaoneMoeForCausalLM") | {
        "head_dim": c.head_dim(facts),
        "sliding_window": facts.need("attention.sliding_window"),
        "layer_types": c.attention_kinds(facts, 4),
        "first_k_dense_replace": facts.dense_lead,
        "num_experts": c.experts(facts),
        "num_shared_experts": c.shared_experts(facts),
        "intermediate_size": c.dense_size(facts),
        "moe_intermediate_size": facts.expert_size(),
        "norm_topk_prob": bool(facts.get("expert_weights_norm", False)),
        "routed_scaling_factor": facts.get("expert_weights_scale") or 1.0,
        "n_group": facts.get("expert_group_count") or 1,
        "topk_group": facts.get("expert_group_used_count") or 1,
    }


def afmoe_names(facts: ModelMetadata) -> Names:
    return Names(
        DENSE
        | QK_NORM
        | SHARED
        | {
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_mlp_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
            "attn_gate": "self_attn.gate_proj",
            "ffn_gate_inp": "mlp.router.gate",
            "exp_probs_b": "mlp.expert_bias",
        },
        biases=frozenset({"exp_probs_b"}),
    )


def afmoe(facts: ModelMetadata) -> dict[str, Any]:
    """llama.cpp scales the embeddings of all models of this kind by the root of their width."""
    c.scored(facts, c.SIGMOID)
    c.normed(facts, True)
    return c.common(facts, "afmoe", "AfmoeForCausalLM") | {
        "head_dim": c.head_dim(facts),
        "sliding_window": facts.need("attention.sliding_window"),
        "layer_types": c.attention_kinds(facts, 4),
        "mup_enabled": True,
        "num_dense_layers": facts.dense_lead,
        "num_experts": c.experts(facts),
        "num_shared_experts": c.shared_experts(facts),
        "intermediate_size": c.dense_size(facts),
        "moe_intermediate_size": facts.expert_size(),
        "route_scale": facts.get("expert_weights_scale") or 1.0,
    }


def mimo_v2_names(facts: ModelMetadata) -> Names:
    sinks = {"attn_sinks": "self_attn.attention_sink_bias"}
    return Names(DENSE | CORRECTION | sinks, biases=frozenset(CORRECTION))


def mimo_v2(facts: ModelMetadata) -> dict[str, Any]:
    c.scored(facts, c.SIGMOID)
    c.normed(facts, True)  # no key; llama.cpp does it for all
    kinds = c.attention_kinds(facts, 0)
    config = c.common(facts, "mimo_v2_flash", "MiMoV2FlashForCausalLM", _shared(facts, kinds))
    width, rotated = c.head_dim(facts), facts.need("rope.dimension_count")
    rope = config["rope_parameters"] | {"partial_rotary_factor": _share(rotated, width)}
    if rope["rope_type"] != "default":
        raise c.refusal("stretches its rotary embedding, which its architecture does not do in transformers")
    return config | {
        **routing(facts),
        "norm_topk_prob": True,
        "rope_parameters": {
            "full_attention": rope,
            "sliding_attention": rope | {"rope_theta": facts.get("rope.freq_base_swa", rope["rope_theta"])},
        },
        "layer_types": kinds,
        "sliding_window": facts.need("attention.sliding_window"),
        "mlp_layer_types": c.mlp_kinds(facts),
        "head_dim": width,
        "v_head_dim": facts.need("attention.value_length"),
        "attention_value_scale": _value_scale(facts, (facts.layers, config["hidden_size"], c.experts(facts))),
        "n_routed_experts": c.experts(facts),
        "moe_intermediate_size": facts.expert_size(),
        "intermediate_size": c.dense_size(facts),
    }


def _shared(facts: ModelMetadata, kinds: list[str]) -> int:
    """Heads of keys and values of layers that attend to all tokens; those with a window have twice as many, and
    weights for a sink. Raises ModelError when they do not."""
    heads, slides = facts.by_layer("attention.head_count_kv"), [kind == "sliding_attention" for kind in kinds]
    full = {count // (2 if here else 1) for count, here in zip(heads, slides, strict=True)}
    sinks = [f"blk.{n}.attn_sinks.weight" in facts.entries for n in range(facts.layers)]
    if len(full) != 1 or sinks != slides:
        raise c.refusal("has layers with other heads or sinks than its architecture has in transformers")
    return int(full.pop())


def _share(rotated: int, width: int) -> float:
    """The share of a head that is rotated, from which transformers computes `rotated` again."""
    share = rotated / width
    return share if int(width * share) == rotated else (rotated + 0.5) / width


def _value_scale(facts: ModelMetadata, sizes: tuple[int, int, int]) -> float:
    known, scale = V2_FLASH
    if facts.get("attention.value_scale") is None and sizes == known:
        return scale
    return float(facts.need("attention.value_scale"))
