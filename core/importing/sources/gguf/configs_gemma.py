"""Gemma 4: each layer has a dense network besides its experts, and layers of full attention have wider heads.

The converter stores the weights as they are. That only a part of the dimensions is rotated in layers of full attention
it writes as divisors of 1e30 for the frequencies of the others.
"""

from typing import Any

from core.importing.sources.gguf import config_parts as c
from core.importing.sources.gguf.facts import ModelMetadata
from core.importing.sources.gguf.layout import DENSE, OUTER, QK_NORM, ExpertLayout, Names
from core.system.gguf import damaged

LAYER = {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "layer_output_scale": "layer_scalar",
    "ffn_gate_inp": "router.proj",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_down_exps.scale": "router.per_expert_scale",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
}
OUTSIDE = {
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
KINDS = ("full_attention", "sliding_attention")
UNTURNED = 1e30


def gemma4_names(facts: ModelMetadata) -> Names:
    return Names(
        DENSE | QK_NORM | LAYER, OUTER | OUTSIDE, ExpertLayout("experts.gate_up_proj", "", "experts.down_proj")
    )


def gemma4(facts: ModelMetadata) -> dict[str, Any]:
    if facts.moe_layers != list(range(facts.layers)):
        raise c.refusal("has layers without experts")
    kinds = c.attention_kinds(facts, 6)
    if kinds[-1] != "full_attention" or len(set(kinds)) < 2:
        raise c.refusal("does not end with a layer of full attention after some with a sliding window")
    keys = facts.by_layer("attention.head_count_kv")
    wide, narrow = ({n for n, kind in zip(keys, kinds, strict=True) if kind == k} for k in KINDS)
    same = {f"blk.{n}.attn_v.weight" in facts.entries for n, kind in enumerate(kinds) if kind == "full_attention"}
    if len(wide) != 1 or len(narrow) != 1 or len(same) != 1 or (wide != narrow and same == {True}):
        raise c.refusal("has layers of one kind that differ in their heads")
    config = c.common(facts, "gemma4_text", "Gemma4ForCausalLM", narrow.pop(), _rotary(facts))
    per_layer = facts.get("embedding_length_per_layer_input") or 0
    embedded = "per_layer_token_embd.weight" if per_layer else "token_embd.weight"
    del config["hidden_act"]
    return config | {
        "hidden_activation": "gelu_pytorch_tanh",
        "head_dim": facts.need("attention.key_length_swa"),
        "global_head_dim": facts.need("attention.key_length"),
        "num_global_key_value_heads": wide.pop(),
        "attention_k_eq_v": same == {False},
        "layer_types": kinds,
        "sliding_window": facts.need("attention.sliding_window"),
        "final_logit_softcapping": facts.get("final_logit_softcapping"),
        "hidden_size_per_layer_input": per_layer,
        "vocab_size_per_layer_input": facts.shape(embedded)[0],
        "intermediate_size": facts.shape("blk.0.ffn_down.weight")[-1],
        "enable_moe_block": True,
        "num_experts": c.experts(facts),
        "top_k_experts": config.pop("num_experts_per_tok"),
        "moe_intermediate_size": facts.expert_size(),
    }


def _rotary(facts: ModelMetadata) -> dict[str, Any]:
    width, narrow = facts.need("attention.key_length"), facts.need("attention.key_length_swa")
    if facts.get("rope.dimension_count_swa", narrow) != narrow:
        raise c.refusal("rotates only a part of the dimensions in layers with a sliding window")
    divisors = facts.values("rope_freqs.weight") if "rope_freqs.weight" in facts.entries else []
    turned = sum(divisor == 1 for divisor in divisors)
    if len(divisors) != width // 2 or any(d < UNTURNED / 2 for d in divisors[turned:]):
        raise damaged(facts.file, "its rope_freqs.weight does not say which dimensions are rotated")
    return {
        "full_attention": {
            "rope_type": "proportional",
            "partial_rotary_factor": 2 * turned / width,
            "rope_theta": facts.need("rope.freq_base"),
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": facts.need("rope.freq_base_swa")},
    }
