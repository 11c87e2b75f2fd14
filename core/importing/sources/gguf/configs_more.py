"""Hunyuan, Ling 2 and Sarvam, Phi and DBRX: config and tensor names."""

import struct
from typing import Any

from core.importing.sources.gguf import config_parts as c
from core.importing.sources.gguf.configs import grouped
from core.importing.sources.gguf.facts import ModelMetadata
from core.importing.sources.gguf.layout import (
    BLOCK_SPARSE,
    BY_NUMBER,
    DENSE,
    OUTER,
    SHARED,
    ExpertLayout,
    Names,
    turned,
)
from core.system.gguf import damaged

HUNYUAN_BASE, HUNYUAN_ALPHA = 10000.0, 1000.0
PHI_SCALE = {(4096, 131072): 1.243163121016122}
"""By the lengths before and after stretching: what Phi-3.5-MoE multiplies the rotary embedding by. Its files have a
number in its place that llama.cpp's converter computes, and that differs."""


def hunyuan_names(facts: ModelMetadata) -> Names:
    shared = {name: target.replace("shared_experts", "shared_mlp") for name, target in SHARED.items()}
    return Names(
        shared
        | {
            "attn_q_norm": "self_attn.query_layernorm",
            "attn_k_norm": "self_attn.key_layernorm",
            "ffn_gate_inp": "mlp.gate.wg",
        },
        biases=frozenset({"attn_q", "attn_k", "attn_v", "attn_output"}),
    )


def hunyuan(facts: ModelMetadata) -> dict[str, Any]:
    c.scored(facts, c.SOFTMAX)
    c.normed(facts, True)
    size, width = facts.expert_size(), c.head_dim(facts)
    if facts.shape("blk.0.ffn_down_shexp.weight")[-1] != size or facts.moe_layers != list(range(facts.layers)):
        raise c.refusal("has shared experts of another width than the others, or layers without experts")
    config = c.common(facts, "hunyuan_v1_moe", "HunYuanMoEV1ForCausalLM")
    theta = config["rope_parameters"]["rope_theta"]
    if struct.pack("<f", theta) == struct.pack("<f", HUNYUAN_BASE * HUNYUAN_ALPHA ** (width / (width - 2))):
        # the converter writes the base as it is after stretching
        stretched = {"rope_type": "dynamic", "rope_theta": HUNYUAN_BASE, "alpha": HUNYUAN_ALPHA, "factor": 1.0}
        config["rope_parameters"] = stretched
    return config | {
        "head_dim": width,
        "attention_bias": facts.has("attn_q.bias"),
        "num_experts": c.experts(facts),
        "moe_topk": config.pop("num_experts_per_tok"),
        "intermediate_size": size,
    }


def bailing2_names(facts: ModelMetadata) -> Names:
    return Names(
        DENSE
        | SHARED
        | {
            "attn_qkv": "attention.query_key_value",
            "attn_output": "attention.dense",
            "attn_q_norm": "attention.query_layernorm",
            "attn_k_norm": "attention.key_layernorm",
            "exp_probs_b": "mlp.gate.expert_bias",
        },
        OUTER | {"token_embd": "model.word_embeddings"},
        biases=frozenset({"exp_probs_b"}),
    )


def bailing2(facts: ModelMetadata) -> dict[str, Any]:
    """Ling 2 and Ring 2 compute what Sarvam's model does, except that they rotate a part of each head."""
    c.scored(facts, c.SIGMOID)
    config = c.common(facts, "sarvam_moe", "Glm4MoeForCausalLM")
    rows = facts.shape("blk.0.attn_qkv.weight")[0]
    width = rows // (config["num_attention_heads"] + 2 * config["num_key_value_heads"])
    if facts.get("attention.key_length", width) != width:
        raise damaged(facts.file, f"its attention.key_length does not go with {rows} rows of queries, keys and values")
    config["rope_parameters"] |= {"partial_rotary_factor": facts.need("rope.dimension_count") / width}
    return config | {
        **grouped(facts),
        "head_dim": width,
        "use_qk_norm": True,
        "attention_bias": False,
        "num_nextn_predict_layers": 0,
    }


def phi_names(facts: ModelMetadata) -> Names:
    biased = ("attn_q", "attn_k", "attn_v", "attn_output", "attn_norm", "ffn_norm", "output_norm", "output")
    return Names(BLOCK_SPARSE, experts=BY_NUMBER, biases=frozenset(biased))


def phi(facts: ModelMetadata) -> dict[str, Any]:
    config = c.common(facts, "phimoe", "PhimoeForCausalLM")
    rope = config["rope_parameters"]
    if rope["rope_type"] == "longrope":
        lengths = rope["original_max_position_embeddings"], config["max_position_embeddings"]
        scale = PHI_SCALE.get(lengths)
        if scale is None:
            raise c.refusal("stretches its rotary embedding by a factor that its file does not have")
        del rope["attention_factor"], rope["factor"]
        rope |= {"short_mscale": scale, "long_mscale": scale}
    return config | {
        "num_local_experts": c.experts(facts),
        "intermediate_size": facts.expert_size(),
        "sliding_window": facts.get("attention.sliding_window") or None,
        "attention_bias": facts.has("attn_q.bias"),
        "lm_head_bias": "output.bias" in facts.entries,
    }


def dbrx_names(facts: ModelMetadata) -> Names:
    return Names(
        {
            "attn_norm": "norm_attn_norm.norm_1",
            "attn_qkv": "norm_attn_norm.attn.Wqkv",
            "attn_output": "norm_attn_norm.attn.out_proj",
            "attn_output_norm": "norm_attn_norm.norm_2",
            "ffn_gate_inp": "ffn.router.layer",
        },
        {"token_embd": "transformer.wte", "output_norm": "transformer.norm_f", "output": "lm_head"},
        ExpertLayout("ffn.experts.mlp.w1", "ffn.experts.mlp.v1", "ffn.experts.mlp.w2", single=turned),
        prefix="transformer.blocks.",
    )


def dbrx(facts: ModelMetadata) -> dict[str, Any]:
    c.scored(facts, c.SOFTMAX)
    c.normed(facts, True)
    if facts.need("attention.layer_norm_epsilon") != 1e-5:
        raise c.refusal("normalises with another epsilon than transformers' model")
    rope = c.rope(facts)
    vocabulary, hidden = facts.shape("token_embd.weight")
    config = {
        "architectures": ["DbrxForCausalLM"],
        "model_type": "dbrx",
        "d_model": hidden,
        "n_heads": facts.need("attention.head_count"),
        "n_layers": facts.layers,
        "max_seq_len": facts.need("context_length"),
        "vocab_size": vocabulary,
        "tie_word_embeddings": False,
        "rope_parameters": rope,
        "attn_config": {
            "clip_qkv": facts.get("attention.clamp_kqv") or None,
            "kv_n_heads": facts.need("attention.head_count_kv"),
            "rope_theta": rope["rope_theta"],
        },
        "ffn_config": {
            "ffn_hidden_size": facts.expert_size(),
            "moe_num_experts": c.experts(facts),
            "moe_top_k": facts.need("expert_used_count"),
            "moe_normalize_expert_weights": 1.0,
        },
    }
    return config | {name: c.special_token(facts.metadata, key) for name, key in c.TOKENS.items()}
