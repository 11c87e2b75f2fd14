"""Models whose layers of full attention stand between layers that see a window: Llama 4, EXAONE MoE and AFMoE.

In all of them only the layers with a window rotate queries and keys.
"""

from collections.abc import Sequence
from typing import Any

import torch

from core.importing.sources.gguf import config_parts as c
from core.importing.sources.gguf.configs import routing
from core.importing.sources.gguf.facts import ModelMetadata
from core.importing.sources.gguf.layout import DENSE, ONE_SHARED, QK_NORM, SHARED, ExpertLayout, Names, joined, turned

CHUNK = 8192
"""What llama.cpp takes to be the chunk of Llama 4's attention, which its files do not say."""
LARGEST = 128
"""Experts of the one Llama 4 that does not normalise queries and keys, by which llama.cpp knows it."""


def _joined_turned(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenated along the outputs, transposed: [..., in, out]."""
    return turned([joined(pieces)])


def llama4_names(facts: ModelMetadata) -> Names:
    names = {name: target.replace("mlp.", "feed_forward.") for name, target in (DENSE | ONE_SHARED).items()}
    return Names(
        names | {"ffn_gate_inp": "feed_forward.router"},
        experts=ExpertLayout(
            "feed_forward.experts.gate_up_proj", "", "feed_forward.experts.down_proj", _joined_turned, turned
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
        **routing(facts),
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
