"""MiMo-V2: layers of full attention between layers that see a window, with other heads, and a sink in each window."""

from typing import Any

from core.importing.sources.gguf import config_parts as c
from core.importing.sources.gguf.configs import routing
from core.importing.sources.gguf.facts import ModelMetadata
from core.importing.sources.gguf.layout import CORRECTION, DENSE, Names

V2_FLASH = ((48, 4096, 256), 0.707)
"""MiMo-V2-Flash: layers, width and experts, by which it is known, and the scale of its values: transformers' default,
which early files do not say."""


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
