"""Nemotron 3, Granite 4.0 H, Jamba and Kimi Linear: layers that keep a state between those that attend.

llama.cpp's converter stores A_log as -exp(A_log), gives A and D of Mamba-2 a second dimension of 1, and divides the
norm of a state into groups. A file does not say in how long pieces a state is computed (chunk_size), nor the least time
step (time_step_min): they have transformers' defaults.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from core.importing.sources.gguf import config_parts as c
from core.importing.sources.gguf.configs import granite_names, multipliers, routing
from core.importing.sources.gguf.configs_latent import APART, MLA, kv_b, latent
from core.importing.sources.gguf.facts import ModelMetadata
from core.importing.sources.gguf.layout import (
    BY_NUMBER,
    CORRECTION,
    OUTER,
    ExpertLayout,
    Names,
    as_kernel,
    flat,
    logarithm,
)
from core.importing.sources.gguf.tensors import Merge
from core.system.gguf import damaged

NEMOTRON = {
    "attn_norm": "norm",
    **{f"attn_{part}": f"mixer.{part}_proj" for part in ("q", "k", "v")},
    "attn_output": "mixer.o_proj",
    "ffn_gate_inp": "mixer.gate",
    "exp_probs_b": "mixer.gate.e_score_correction_bias",
    "ffn_up_shexp": "mixer.shared_experts.up_proj",
    "ffn_down_shexp": "mixer.shared_experts.down_proj",
    "ffn_latent_down": "mixer.fc1_latent_proj",
    "ffn_latent_up": "mixer.fc2_latent_proj",
}
JAMBA = {
    "ffn_norm": "pre_ff_layernorm",
    **{f"ffn_{part}": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")},
    "ffn_gate_inp": "feed_forward.router",
    "ssm_a": "mamba.A_log",
    "ssm_d": "mamba.D",
    "ssm_conv1d": "mamba.conv1d",
    **{f"ssm_{part}": f"mamba.{part}_proj" for part in ("in", "x", "dt", "out")},
    **{f"ssm_{part}_norm": f"mamba.{part}_layernorm" for part in ("dt", "b", "c")},
}
KIMI = {
    **{f"ffn_{part}": f"block_sparse_moe.{part}_proj" for part in ("gate", "up", "down")},
    **{f"ffn_{part}_shexp": f"block_sparse_moe.shared_experts.{part}_proj" for part in ("gate", "up", "down")},
    "ffn_gate_inp": "block_sparse_moe.gate",
    "exp_probs_b": "block_sparse_moe.gate.e_score_correction_bias",
    **{f"ssm_conv1d_{part}": f"self_attn.{part}_conv1d" for part in ("q", "k", "v")},
    **{f"ssm_{part}": f"self_attn.{part}_proj" for part in ("f_a", "f_b", "g_a", "g_b")},
    "ssm_beta": "self_attn.b_proj",
    "ssm_a": "self_attn.A_log",
    "ssm_dt": "self_attn.dt_bias",
    "ssm_norm": "self_attn.o_norm",
}


def _log_of_heads(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    """-exp(A_log), one number a head -> A_log [heads]."""
    return logarithm(pieces).flatten()


def _log_of_kimi(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    """-exp(A_log), one number a head -> A_log [1, 1, heads, 1]."""
    return logarithm(pieces).reshape(1, 1, -1, 1)


def _mamba2(module: str) -> dict[str, str]:
    """Names of a Mamba-2 layer, whose `module` it is."""
    parts = {"in": "in_proj", "conv1d": "conv1d", "dt": "dt_bias", "a": "A_log", "d": "D", "norm": "norm"}
    return {f"ssm_{stored}": f"{module}.{target}" for stored, target in (parts | {"out": "out_proj"}).items()}


MAMBA2: Mapping[str, Merge] = {"ssm_conv1d": as_kernel, "ssm_a": _log_of_heads, "ssm_d": flat, "ssm_norm": flat}
BIASED = frozenset({"ssm_conv1d", "ssm_dt"})


def nemotron_h_names(facts: ModelMetadata) -> Names:
    return Names(
        _mamba2("mixer") | NEMOTRON,
        {"token_embd": "backbone.embeddings", "output_norm": "backbone.norm_f", "output": "lm_head"},
        ExpertLayout("", "mixer.experts.{}.up_proj.weight", "mixer.experts.{}.down_proj.weight"),
        BIASED | CORRECTION.keys(),
        MAMBA2,
        prefix="backbone.layers.",
    )


def granite_hybrid_names(facts: ModelMetadata) -> Names:
    plain = granite_names(facts)
    return replace(plain, layers={**plain.layers, **_mamba2("mamba")}, biases=BIASED, merges={**plain.merges, **MAMBA2})


def jamba_names(facts: ModelMetadata) -> Names:
    return Names(
        JAMBA,
        OUTER | {"output_norm": "model.final_layernorm"},
        ExpertLayout(
            "feed_forward.experts.{}.gate_proj.weight",
            "feed_forward.experts.{}.up_proj.weight",
            "feed_forward.experts.{}.down_proj.weight",
        ),
        BIASED,
        {"ssm_conv1d": as_kernel, "ssm_a": logarithm},
    )


def kimi_linear_names(facts: ModelMetadata) -> Names:
    kernels: dict[str, Merge] = {f"ssm_conv1d_{part}": as_kernel for part in ("q", "k", "v")}
    return Names(
        MLA | KIMI,
        experts=BY_NUMBER,
        biases=frozenset({"exp_probs_b", "ssm_dt"}),
        merges={"ssm_a": _log_of_kimi, "ssm_norm": flat, **kernels},
        more=kv_b,
        ignored=APART,
    )


def _kinds(facts: ModelMetadata) -> list[str]:
    """By layer, as transformers calls them: those without heads of keys keep a state. Raises ModelError where the
    weights are of another kind."""
    heads = facts.by_layer("attention.head_count_kv")
    for n, count in enumerate(heads):
        if bool(count) == (f"blk.{n}.ssm_a" in facts.entries) and (count or n not in facts.moe_layers):
            raise damaged(facts.file, f"the weights of its layer {n} are not of the kind that its metadata says")
    return ["full_attention" if count else "linear_attention" for count in heads]


def _without(config: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name not in names}


def _divided(facts: ModelMetadata, key: str, parts: int) -> int:
    """A size in metadata over a number of parts. Raises ModelError where it is no multiple."""
    whole = int(facts.need(key))
    if whole % parts:
        raise damaged(facts.file, f"its {key} of {whole:,} is no multiple of {parts:,}")
    return whole // parts


def nemotron_h(facts: ModelMetadata) -> dict[str, Any]:
    c.scored(facts, c.SIGMOID)
    config, moe = c.common(facts, "nemotron_h", "NemotronHForCausalLM"), facts.moe_layers
    shared, narrow = (f"blk.{moe[0]}.ffn_{part}.weight" for part in ("down_shexp", "latent_down"))
    heads = facts.need("ssm.time_step_rank")
    return _without(config, "rope_parameters", "hidden_act", "rms_norm_eps") | {
        **routing(facts),
        "layers_block_type": ["moe" if n in moe else kind for n, kind in enumerate(_kinds(facts))],
        "layer_norm_epsilon": config["rms_norm_eps"],
        "head_dim": c.head_dim(facts),
        "n_routed_experts": c.experts(facts),
        "n_shared_experts": facts.get("expert_shared_count", 1),
        "moe_intermediate_size": facts.expert_size(),
        "moe_shared_expert_intermediate_size": facts.shape(shared)[-1],
        "moe_latent_size": facts.shape(narrow)[0] if narrow in facts.entries else None,
        "mamba_num_heads": heads,
        "mamba_head_dim": _divided(facts, "ssm.inner_size", heads),
        "n_groups": facts.need("ssm.group_count"),
        "ssm_state_size": facts.need("ssm.state_size"),
        "conv_kernel": facts.need("ssm.conv_kernel"),
        "use_conv_bias": facts.has("ssm_conv1d.bias"),
    }


def granite_hybrid(facts: ModelMetadata) -> dict[str, Any]:
    heads = facts.need("ssm.time_step_rank")
    config = c.common(facts, "granitemoehybrid", "GraniteMoeHybridForCausalLM")
    return config | {
        **multipliers(facts),
        "num_local_experts": c.experts(facts),
        "intermediate_size": facts.expert_size(),
        "shared_intermediate_size": facts.shape(facts.first("ffn_down_shexp.weight"))[-1],
        "layer_types": _kinds(facts),
        "position_embedding_type": "rope" if facts.need("rope.scaling.finetuned") else None,
        "mamba_n_heads": heads,
        "mamba_d_head": _divided(facts, "ssm.inner_size", heads),
        "mamba_expand": _divided(facts, "ssm.inner_size", config["hidden_size"]),
        "mamba_n_groups": facts.need("ssm.group_count"),
        "mamba_d_state": facts.need("ssm.state_size"),
        "mamba_d_conv": facts.need("ssm.conv_kernel"),
        "mamba_conv_bias": facts.has("ssm_conv1d.bias"),
    }


def jamba(facts: ModelMetadata) -> dict[str, Any]:
    c.scored(facts, c.SOFTMAX)
    c.normed(facts, False)
    config = c.common(facts, "jamba", "JambaForCausalLM")
    attends = [n for n, kind in enumerate(_kinds(facts)) if kind == "full_attention"]
    (attention_period, attention_offset), (period, offset) = (
        _spaced(facts, layers) for layers in (attends, facts.moe_layers)
    )
    return _without(config, "rope_parameters") | {
        "num_experts": c.experts(facts),
        "intermediate_size": facts.expert_size(),
        "attn_layer_period": attention_period,
        "attn_layer_offset": attention_offset,
        "expert_layer_period": period,
        "expert_layer_offset": offset,
        "mamba_expand": _divided(facts, "ssm.inner_size", config["hidden_size"]),
        "mamba_d_state": facts.need("ssm.state_size"),
        "mamba_d_conv": facts.need("ssm.conv_kernel"),
        "mamba_dt_rank": facts.need("ssm.time_step_rank"),
        "mamba_conv_bias": facts.has("ssm_conv1d.bias"),
    }


def _spaced(facts: ModelMetadata, layers: Sequence[int]) -> tuple[int, int]:
    """(period, offset) of evenly spaced layers. Raises ModelError when they are not."""
    period = layers[1] - layers[0] if len(layers) > 1 else facts.layers
    if not layers or layers[0] >= period or list(layers) != list(range(layers[0], facts.layers, period)):
        raise c.refusal(
            "has layers with attention or with experts that are not evenly spaced, as its architecture has them"
        )
    return period, layers[0]


def kimi_linear(facts: ModelMetadata) -> dict[str, Any]:
    c.scored(facts, c.SIGMOID)
    c.normed(facts, True)  # no key; llama.cpp does it for all
    config = c.common(facts, "kimi_linear", "KimiLinearForCausalLM")
    route = routing(facts)
    return _without(config, "rope_parameters", "max_position_embeddings", "num_experts_per_tok") | {
        **latent(facts),
        "model_max_length": config["max_position_embeddings"],
        "num_experts": c.experts(facts),
        "num_experts_per_token": config["num_experts_per_tok"],
        "num_shared_experts": c.shared_experts(facts),
        "moe_intermediate_size": facts.expert_size(),
        "intermediate_size": c.dense_size(facts),
        "routed_scaling_factor": route["routed_scaling_factor"],
        "moe_renormalize": True,
        "num_expert_group": route["n_group"],
        "topk_group": route["topk_group"],
        "layer_types": _kinds(facts),
        "mlp_layer_types": c.mlp_kinds(facts),
        "linear_head_dim": facts.need("kda.head_dim"),
        "linear_num_heads": facts.shape(facts.first("ssm_beta.weight"))[0],
        "linear_conv_kernel_dim": facts.need("ssm.conv_kernel"),
    }
