"""Latent attention (MLA): DeepSeek-V2, V3 and V3.2, Kimi K2, GLM-4.7-Flash and GLM-5, Mistral Large 3 and Small 4."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from core.errors import ModelError
from core.importing.sources.gguf import config_parts as c
from core.importing.sources.gguf.configs import grouped
from core.importing.sources.gguf.facts import ModelMetadata
from core.importing.sources.gguf.layout import CORRECTION, DENSE, SHARED, ExpertLayout, Names, same
from core.importing.sources.gguf.tensors import TensorRecipe, TensorRows
from core.system.gguf import TensorInfo, damaged

MLA = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
}
APART = frozenset({"attn_k_b", "attn_v_b"})
INDEXER = {
    "indexer.attn_q_b": "self_attn.indexer.wq_b",
    "indexer.attn_k": "self_attn.indexer.wk",
    "indexer.k_norm": "self_attn.indexer.k_norm",
    "indexer.proj": "self_attn.indexer.weights_proj",
}

GROUPS = {160: (8, 3), 256: (8, 4)}
"""By number of experts: groups and chosen groups of DeepSeek-V2 and V3, whose files before October 2025 do not say."""
INDEX_KEYS = "indexer.attn_k"
GLM_5_2 = 1 << 20
"""The context of GLM-5.2. Early files of it do not say which layers select tokens themselves, some have weights for
that in every layer, and llama.cpp takes its own pattern (src/models/glm-dsa.cpp)."""
SMALL_4 = (8192, 0.1)
"""Mistral Small 4: the context before stretching, by which it is known, and the strength of its scaling of queries by
position, which llama.cpp's converter leaves out."""


def _is_mistral(facts: ModelMetadata) -> bool:
    return bool(facts.get("attention.temperature_scale"))


def deepseek_names(facts: ModelMetadata) -> Names:
    if _is_mistral(facts):
        return mistral4_names(facts)
    return Names(DENSE | SHARED | CORRECTION | MLA, biases=frozenset(CORRECTION), more=kv_b, ignored=APART)


def kv_b(entries: Mapping[str, TensorInfo], prefix: str) -> dict[str, TensorRecipe]:
    """Up-projections of keys and values, which newer files store separately: k [heads, rank, nope],
    v [heads, v, rank]."""
    stored = [f"{prefix}attn_{part}_b.weight" for part in ("k", "v")]
    if f"{prefix}attn_kv_b.weight" in entries or not all(name in entries for name in stored):
        return {}

    def merge(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat((pieces[0].transpose(1, 2), pieces[1]), dim=1).flatten(0, 1)

    heads, rank, nope = entries[stored[0]].shape
    shape = (heads * (nope + entries[stored[1]].shape[1]), rank)
    return {"self_attn.kv_b_proj.weight": TensorRecipe(tuple(TensorRows(s) for s in stored), shape, merge)}


def indexed_names(facts: ModelMetadata) -> Names:
    """Of DeepSeek-V3.2 and GLM-5, which have a part that selects the tokens that attention reads."""
    full = own_index(facts)

    def more(entries: Mapping[str, TensorInfo], prefix: str) -> dict[str, TensorRecipe]:
        made = kv_b(entries, prefix)
        if full[int(prefix.split(".")[1])]:
            for stored, target in INDEXER.items():
                for kind in ("weight", "bias"):
                    if (name := f"{prefix}{stored}.{kind}") in entries:
                        made[f"{target}.{kind}"] = TensorRecipe((TensorRows(name),), entries[name].shape, same)
        return made

    return Names(
        DENSE | SHARED | CORRECTION | MLA, biases=frozenset(CORRECTION), more=more, ignored=APART | INDEXER.keys()
    )


def mistral4_names(facts: ModelMetadata) -> Names:
    experts = ExpertLayout("mlp.experts.gate_up_proj", "", "mlp.experts.down_proj")
    return Names(DENSE | SHARED | MLA, experts=experts, more=kv_b, ignored=APART)


def latent(facts: ModelMetadata) -> dict[str, Any]:
    """Sizes of latent attention. Each head has keys of its own, though llama.cpp counts one for all."""
    rotated = facts.need("rope.dimension_count")
    key = facts.get("attention.key_length_mla") or facts.need("attention.key_length")
    q_rank = facts.first("attn_q_a.weight")
    return {
        "num_key_value_heads": facts.need("attention.head_count"),
        "kv_lora_rank": facts.need("attention.kv_lora_rank"),
        "q_lora_rank": facts.shape(q_rank)[0] if q_rank in facts.entries else None,
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": key - rotated,
        "v_head_dim": facts.get("attention.value_length_mla") or facts.need("attention.value_length"),
    }


def _common(
    facts: ModelMetadata, model_type: str, kind: str, default_groups: tuple[int, int] = (1, 1)
) -> dict[str, Any]:
    config = c.common(facts, model_type, kind) | grouped(facts, default_groups) | latent(facts)
    if config["rope_parameters"]["rope_type"] == "yarn" and (log := facts.get("rope.scaling.yarn_log_multiplier")):
        scale = round(log * 10, 6)  # llama.cpp stores a tenth of mscale_all_dim, and takes mscale to be the same
        config["rope_parameters"] |= {"mscale": scale, "mscale_all_dim": scale}
    return config


def deepseek(facts: ModelMetadata) -> dict[str, Any]:
    """DeepSeek-V2 and V3 and models like them; GLM-4.7-Flash, which is the one with a tokenizer of GLM; and Mistral
    Large 3 and Small 4 from files in Mistral's format, which are the ones that scale queries by position."""
    if _is_mistral(facts):
        return mistral4(facts)
    if facts.metadata.get("tokenizer.ggml.pre") == "glm4":
        return _glm_lite(facts)
    is_v3 = facts.has("exp_probs_b.bias") or facts.get("expert_gating_func") == c.SIGMOID
    c.scored(facts, c.SIGMOID if is_v3 else c.SOFTMAX)
    kind = ("deepseek_v3", "DeepseekV3ForCausalLM") if is_v3 else ("deepseek_v2", "DeepseekV2ForCausalLM")
    config = _common(facts, *kind, GROUPS.get(c.experts(facts), (1, 1)))
    if is_v3:
        return config | {"rope_interleave": True, "num_nextn_predict_layers": 0}
    c.normed(facts, False)
    return config | {"topk_method": "greedy" if config["n_group"] == 1 else "group_limited_greedy"}


def _glm_lite(facts: ModelMetadata) -> dict[str, Any]:
    c.scored(facts, c.SIGMOID)
    config = _common(facts, "glm4_moe_lite", "Glm4MoeLiteForCausalLM")
    del config["first_k_dense_replace"]
    return config | {"mlp_layer_types": c.mlp_kinds(facts), "rope_interleave": True}


def deepseek_v32(facts: ModelMetadata) -> dict[str, Any]:
    c.scored(facts, c.SIGMOID)
    if not all(own_index(facts)):
        raise damaged(facts.file, "some of its layers lack the weights that select tokens")
    return _common(facts, "deepseek_v32", "DeepseekV32ForCausalLM") | _indexed(facts)


def glm_dsa(facts: ModelMetadata) -> dict[str, Any]:
    c.scored(facts, c.SIGMOID)
    kinds = ["full" if full else "shared" for full in own_index(facts)]
    return _common(facts, "glm_moe_dsa", "GlmMoeDsaForCausalLM") | _indexed(facts) | {"indexer_types": kinds}


def own_index(facts: ModelMetadata) -> list[bool]:
    """By layer: whether it selects tokens itself; otherwise it reads those that the last such layer selected.

    Raises ModelError where the weights for that are missing.
    """
    layers = range(facts.layers)
    held = [f"blk.{n}.{INDEX_KEYS}.weight" in facts.entries for n in layers]
    stated = facts.by_layer("attention.indexer.types")
    if any(one not in (0, 1, None) for one in stated):
        raise damaged(facts.file, f"its attention.indexer.types is {stated!r:.60}")
    if None not in stated:
        full = [bool(one) for one in stated]
    elif all(held) and facts.need("context_length") >= GLM_5_2:
        full = [n < 2 or n % 4 == 2 for n in layers]
    else:
        full = held
    lost = [n for n in layers if full[n] and not held[n]]
    if lost or not full[0]:
        raise ModelError(f"This GGUF model lacks blk.{lost[0] if lost else 0}.{INDEX_KEYS}.weight. Download it again.")
    return full


def _indexed(facts: ModelMetadata) -> dict[str, Any]:
    """Sizes of the part that selects which tokens attention reads."""
    return {
        "index_n_heads": facts.need("attention.indexer.head_count"),
        "index_head_dim": facts.need("attention.indexer.key_length"),
        "index_topk": facts.need("attention.indexer.top_k"),
    }


def mistral4(facts: ModelMetadata) -> dict[str, Any]:
    c.scored(facts, c.SOFTMAX)
    config = _common(facts, "mistral4", "Mistral4ForCausalLM")
    rope = config["rope_parameters"]
    if rope["rope_type"] != "yarn":
        raise c.refusal(
            "does not stretch its rotary embedding with YaRN, as its architecture always does in transformers"
        )
    short, beta = rope["original_max_position_embeddings"], facts.get("attention.temperature_scale")
    if beta is None and short == SMALL_4[0]:
        beta = SMALL_4[1]
    if beta is None:
        raise c.refusal("does not say how it scales its queries by position (attention.temperature_scale)")
    if facts.get("attention.temperature_length", short) not in (0, short):
        raise damaged(facts.file, "its attention.temperature_length is not the context of its rotary embedding")
    wide = config["qk_rope_head_dim"] + config["qk_nope_head_dim"]
    rope |= {"llama_4_scaling_beta": beta, "partial_rotary_factor": config["qk_rope_head_dim"] / wide}
    return config | {"rope_interleave": True}
