"""The supported GGUF architectures: ggml's name -> config and tensor names in transformers.

Meaning of the keys: llama.cpp's conversion/*.py (which writes them) and src/models/*.cpp (which uses them).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from core.errors import ModelError
from core.importing.sources.gguf import configs, configs_latent, configs_states, configs_windowed, states
from core.importing.sources.gguf.facts import ModelMetadata
from core.importing.sources.gguf.layout import (
    DENSE,
    OUTER,
    QK_NORM,
    SHARED,
    ExpertLayout,
    Names,
    as_kernel,
    as_row,
    heads_unpaired,
    joined,
    same,
    turned,
    woven,
)
from core.importing.sources.gguf.tensors import Merge, TensorRecipe, TensorRows
from core.system.gguf import TensorInfo

BLOCK_SPARSE = {"ffn_gate_inp": "block_sparse_moe.gate"}
BY_NUMBER = ExpertLayout(
    "block_sparse_moe.experts.{}.w1.weight",
    "block_sparse_moe.experts.{}.w3.weight",
    "block_sparse_moe.experts.{}.w2.weight",
)
GRANITE = {"ffn_gate_inp": "block_sparse_moe.router.layer", "ffn_down_shexp": "shared_mlp.output_linear"}
GRANITE_EXPERTS = ExpertLayout("block_sparse_moe.input_linear.weight", "", "block_sparse_moe.output_linear.weight")
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
INDEXER = {
    "indexer.attn_q_b": "self_attn.indexer.wq_b",
    "indexer.attn_k": "self_attn.indexer.wk",
    "indexer.k_norm": "self_attn.indexer.k_norm",
    "indexer.proj": "self_attn.indexer.weights_proj",
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
    """`config` raises ModelError for models of this architecture that cannot be converted. `settings`: those of
    facts.BEYOND that it converts."""

    config: Callable[[ModelMetadata], dict[str, Any]]
    names: Callable[[ModelMetadata], Names]
    settings: frozenset[str] = frozenset()


def _unpaired(facts: ModelMetadata) -> dict[str, Merge]:
    heads = facts.need("attention.head_count")
    shared = max(facts.by_layer("attention.head_count_kv", heads))  # 0 in layers without attention
    return {"attn_q": heads_unpaired(heads), "attn_k": heads_unpaired(shared)}


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


def _indexed(facts: ModelMetadata) -> Names:
    """Latent attention with a part that selects tokens: names of DeepSeek-V3.2 and GLM-5."""
    full = configs_latent.own_index(facts)

    def more(entries: Mapping[str, TensorInfo], prefix: str) -> dict[str, TensorRecipe]:
        made = _kv_b(entries, prefix)
        if full[int(prefix.split(".")[1])]:
            for stored, target in INDEXER.items():
                for kind in ("weight", "bias"):
                    if (name := f"{prefix}{stored}.{kind}") in entries:
                        made[f"{target}.{kind}"] = TensorRecipe((TensorRows(name),), entries[name].shape, same)
        return made

    return Names(
        DENSE | SHARED | CORRECTION | MLA,
        biases=frozenset(CORRECTION),
        more=more,
        ignored=frozenset({"attn_k_b", "attn_v_b", *INDEXER}),
    )


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(configs.mixtral, lambda f: Names(BLOCK_SPARSE, experts=BY_NUMBER, merges=_unpaired(f))),
    "qwen2moe": Architecture(
        configs.qwen2_moe,
        lambda f: Names(
            DENSE | ONE_SHARED | {"ffn_gate_inp_shexp": "mlp.shared_expert_gate"},
            biases=QKV,
            merges={"ffn_gate_inp_shexp": as_row},
        ),
    ),
    "qwen3moe": Architecture(configs.qwen3_moe, lambda f: Names(DENSE | QK_NORM)),
    "olmoe": Architecture(configs.olmoe, lambda f: Names(QK_NORM)),
    "granitemoe": Architecture(
        configs.granite,
        lambda f: Names(
            GRANITE,
            experts=GRANITE_EXPERTS,
            merges=_unpaired(f),
            more=_granite_shared,
        ),
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
    ),
    "glm4moe": Architecture(
        configs.glm4_moe,
        lambda f: Names(
            DENSE | QK_NORM | SHARED | CORRECTION | {"post_attention_norm": "post_attention_layernorm"},
            biases=QKV | set(CORRECTION),
        ),
    ),
    "dots1": Architecture(
        configs.dots1, lambda f: Names(DENSE | QK_NORM | SHARED | CORRECTION, biases=frozenset(CORRECTION))
    ),
    "deepseek2": Architecture(
        configs_latent.deepseek,
        lambda f: Names(
            DENSE | SHARED | CORRECTION | MLA,
            biases=frozenset(CORRECTION),
            more=_kv_b,
            ignored=frozenset({"attn_k_b", "attn_v_b"}),
        ),
    ),
    "deepseek32": Architecture(configs_latent.deepseek_v32, _indexed),
    "glm-dsa": Architecture(configs_latent.glm_dsa, _indexed),
    "mistral4": Architecture(
        configs_latent.mistral4,
        lambda f: Names(
            DENSE | SHARED | MLA,
            experts=ExpertLayout("mlp.experts.gate_up_proj", "", "mlp.experts.down_proj"),
            more=_kv_b,
            ignored=frozenset({"attn_k_b", "attn_v_b"}),
        ),
        frozenset({"attention.temperature_scale"}),
    ),
    "nemotron_h_moe": Architecture(
        configs_states.nemotron_h,
        lambda f: Names(
            states.mamba2("mixer") | states.NEMOTRON,
            states.NEMOTRON_OUTER,
            ExpertLayout("", "mixer.experts.{}.up_proj.weight", "mixer.experts.{}.down_proj.weight"),
            states.MAMBA2_BIASES | set(CORRECTION),
            states.MAMBA2_MERGES,
            below="backbone.layers.",
        ),
        frozenset({"moe_latent_size"}),
    ),
    "granitehybrid": Architecture(
        configs_states.granite_hybrid,
        lambda f: Names(
            GRANITE | states.mamba2("mamba"),
            experts=GRANITE_EXPERTS,
            biases=states.MAMBA2_BIASES,
            merges={**states.MAMBA2_MERGES, **_unpaired(f)},
            more=_granite_shared,
        ),
    ),
    "jamba": Architecture(
        configs_states.jamba,
        lambda f: Names(
            states.JAMBA,
            {**OUTER, "output_norm": "model.final_layernorm"},
            ExpertLayout(*(f"feed_forward.experts.{{}}.{part}_proj.weight" for part in ("gate", "up", "down"))),
            states.MAMBA2_BIASES,
            {"ssm_conv1d": as_kernel, "ssm_a": states.as_log},
        ),
    ),
    "mimo2": Architecture(
        configs_windowed.mimo_v2,
        lambda f: Names(
            DENSE | CORRECTION | {"attn_sinks": "self_attn.attention_sink_bias"}, biases=frozenset(CORRECTION)
        ),
        frozenset({"attention.value_scale"}),
    ),
    "kimi-linear": Architecture(
        configs_states.kimi_linear,
        lambda f: Names(
            MLA | states.KIMI,
            experts=BY_NUMBER,
            biases=frozenset({"exp_probs_b", "ssm_dt"}),
            merges={
                "ssm_a": states.log_of_kimi,
                "ssm_norm": states.flat,
                **{f"ssm_conv1d_{part}": as_kernel for part in ("q", "k", "v")},
            },
            more=_kv_b,
            ignored=frozenset({"attn_k_b", "attn_v_b"}),
        ),
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


SCALED = frozenset(
    {"glm4moe", "dots1", "deepseek2", "deepseek32", "glm-dsa", "mistral4", "nemotron_h_moe", "kimi-linear", "mimo2"}
)
"""Architectures with a routed_scaling_factor."""
WINDOWED = frozenset({"gpt-oss", "mimo2"})
"""Architectures with a sliding window."""


def architecture_of(facts: ModelMetadata) -> Architecture:
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
    if facts.architecture not in WINDOWED and facts.get("attention.sliding_window"):
        raise ModelError(
            "This GGUF model uses a sliding window, which its architecture does not have in transformers. "
            "Import the model's safetensors version instead."
        )
    if facts.architecture not in SCALED and facts.get("expert_weights_scale", 1) not in (0, 1):
        raise ModelError(
            "This GGUF model's router scales what experts give, which its architecture does not have in "
            "transformers. Import the model's safetensors version instead."
        )
    facts.check(found.settings)
    return found
