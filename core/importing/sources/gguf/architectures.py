"""The supported GGUF architectures: ggml's name -> config and tensor names in transformers.

Meaning of the keys: llama.cpp's conversion/*.py (which writes them) and src/models/*.cpp (which uses them).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from core.errors import ModelError
from core.importing.sources.gguf import configs, configs_gemma, configs_linear, configs_more, configs_windowed
from core.importing.sources.gguf.facts import ModelMetadata
from core.importing.sources.gguf.layout import (
    BLOCK_SPARSE,
    BY_NUMBER,
    CORRECTION,
    DENSE,
    ONE_SHARED,
    OUTER,
    QK_NORM,
    SHARED,
    ExpertLayout,
    Names,
    as_kernel,
    as_row,
    heads_unpaired,
    joined,
    turned,
    woven,
)
from core.importing.sources.gguf.refused import refusal
from core.importing.sources.gguf.tensors import TensorRecipe, TensorRows
from core.system.gguf import TensorInfo

QKV = frozenset({"attn_q", "attn_k", "attn_v"})
SCALED = frozenset({"expert_weights_scale"})
WINDOW = frozenset({"attention.sliding_window"})
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
    """`config` raises ModelError for models of this architecture that cannot be converted; `handled`: those of
    `facts.BEYOND` that it converts."""

    config: Callable[[ModelMetadata], dict[str, Any]]
    names: Callable[[ModelMetadata], Names]
    handled: frozenset[str] = frozenset()


def _unpaired(facts: ModelMetadata) -> dict[str, Any]:
    heads = facts.need("attention.head_count")
    return {"attn_q": heads_unpaired(heads), "attn_k": heads_unpaired(facts.get("attention.head_count_kv", heads))}


def _granite_shared(entries: Mapping[str, TensorInfo], prefix: str) -> dict[str, TensorRecipe]:
    stored = [f"{prefix}ffn_{part}_shexp.weight" for part in ("gate", "up")]
    if stored[0] not in entries:
        return {}
    out, columns = entries[stored[0]].shape
    return {
        "shared_mlp.input_linear.weight": TensorRecipe(tuple(TensorRows(s) for s in stored), (2 * out, columns), joined)
    }


def _kv_b(entries: Mapping[str, TensorInfo], prefix: str) -> dict[str, TensorRecipe]:
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


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(configs.mixtral, lambda f: Names(BLOCK_SPARSE, experts=BY_NUMBER, merges=_unpaired(f))),
    "qwen2moe": Architecture(
        configs.qwen2_moe,
        lambda f: Names(
            DENSE | ONE_SHARED,
            biases=QKV,
            merges={"ffn_gate_inp_shexp": as_row},
        ),
    ),
    "qwen35moe": Architecture(configs_linear.qwen35, configs_linear.qwen35_names),
    "qwen3next": Architecture(configs_linear.qwen3_next, configs_linear.qwen3_next_names),
    "gemma4": Architecture(configs_gemma.gemma4, configs_gemma.gemma4_names, WINDOW | {"final_logit_softcapping"}),
    "qwen3vlmoe": Architecture(configs.qwen3_moe, lambda f: Names(DENSE | QK_NORM)),  # for text it computes the same
    "llama4": Architecture(configs_windowed.llama4, configs_windowed.llama4_names),
    "hunyuan-moe": Architecture(configs_more.hunyuan, configs_more.hunyuan_names),
    "bailingmoe2": Architecture(configs_more.bailing2, configs_more.bailing2_names, SCALED),
    "exaone-moe": Architecture(configs_windowed.exaone, configs_windowed.exaone_names, WINDOW | SCALED),
    "phimoe": Architecture(configs_more.phi, configs_more.phi_names, WINDOW),
    "afmoe": Architecture(configs_windowed.afmoe, configs_windowed.afmoe_names, WINDOW | SCALED),
    "dbrx": Architecture(configs_more.dbrx, configs_more.dbrx_names, frozenset({"attention.clamp_kqv"})),
    "qwen3moe": Architecture(configs.qwen3_moe, lambda f: Names(DENSE | QK_NORM)),
    "olmoe": Architecture(configs.olmoe, lambda f: Names(QK_NORM)),
    "granitemoe": Architecture(
        configs.granite,
        lambda f: Names(
            {"ffn_gate_inp": "block_sparse_moe.router.layer", "ffn_down_shexp": "shared_mlp.output_linear"},
            experts=ExpertLayout("block_sparse_moe.input_linear.weight", "", "block_sparse_moe.output_linear.weight"),
            merges=_unpaired(f),
            more=_granite_shared,
        ),
        frozenset({"attention.scale", "embedding_scale", "residual_scale", "logit_scale"}),
    ),
    "gpt-oss": Architecture(
        configs.gpt_oss,
        lambda f: Names(
            {
                "ffn_gate_inp": "mlp.router",
                "attn_sinks": "self_attn.sinks",
                "post_attention_norm": "post_attention_layernorm",
            },
            experts=ExpertLayout("mlp.experts.gate_up_proj", "", "mlp.experts.down_proj", woven, turned),
            biases=QKV | {"attn_output", "ffn_gate_inp"},
        ),
        WINDOW,
    ),
    "glm4moe": Architecture(
        configs.glm4_moe,
        lambda f: Names(
            DENSE | QK_NORM | SHARED | CORRECTION | {"post_attention_norm": "post_attention_layernorm"},
            biases=QKV | set(CORRECTION),
        ),
        SCALED,
    ),
    "dots1": Architecture(
        configs.dots1, lambda f: Names(DENSE | QK_NORM | SHARED | CORRECTION, biases=frozenset(CORRECTION)), SCALED
    ),
    "deepseek2": Architecture(
        configs.deepseek,
        lambda f: Names(
            DENSE | SHARED | CORRECTION | MLA,
            biases=frozenset(CORRECTION),
            more=_kv_b,
            ignored=frozenset({"attn_k_b", "attn_v_b"}),
        ),
        SCALED,
    ),
    "ernie4_5-moe": Architecture(
        configs.ernie,
        lambda f: Names(
            DENSE | SHARED | {"exp_probs_b": "mlp.moe_statics.e_score_correction_bias"},
            biases=frozenset(CORRECTION),
            merges={"exp_probs_b": as_row},
        ),
    ),
    "lfm2moe": Architecture(
        configs.lfm2_moe,
        lambda f: Names(
            LFM2,
            {**OUTER, "token_embd_norm": "model.embedding_norm", "output_norm": "model.embedding_norm"},
            ExpertLayout(
                "feed_forward.experts.{}.w1.weight",
                "feed_forward.experts.{}.w3.weight",
                "feed_forward.experts.{}.w2.weight",
            ),
            frozenset(CORRECTION),
            {"shortconv.conv": as_kernel},
        ),
    ),
    "minimax-m2": Architecture(
        configs.minimax,
        lambda f: Names(
            BLOCK_SPARSE | QK_NORM | {"exp_probs_b": "block_sparse_moe.e_score_correction_bias"},
            experts=BY_NUMBER,
            biases=frozenset(CORRECTION),
        ),
    ),
}


def architecture_of(facts: ModelMetadata) -> Architecture:
    """Raises ModelError for an unsupported architecture, and for a model without experts."""
    found = ARCHITECTURES.get(facts.architecture)
    if found is None:
        raise refusal(facts.architecture, ARCHITECTURES)
    facts.check_layers()
    if not facts.moe_layers:
        raise ModelError(
            f"This GGUF model ({facts.architecture}) has no experts: it is not a Mixture-of-Experts "
            "model. Choose another model."
        )
    facts.check(found.handled)
    return found
