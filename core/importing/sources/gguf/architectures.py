"""The supported GGUF architectures: ggml's name -> config and tensor names in transformers.

Meaning of the keys: llama.cpp's conversion/*.py (which writes them) and src/models/*.cpp (which uses them).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from core.errors import ModelError
from core.importing.sources.gguf import (
    configs,
    configs_gemma,
    configs_latent,
    configs_linear,
    configs_mimo,
    configs_more,
    configs_states,
    configs_windowed,
)
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
    turned,
    woven,
)
from core.importing.sources.gguf.refused import refusal

QKV = frozenset({"attn_q", "attn_k", "attn_v"})
SCALED = frozenset({"expert_weights_scale"})
WINDOW = frozenset({"attention.sliding_window"})
GRANITE = frozenset({"attention.scale", "embedding_scale", "residual_scale", "logit_scale"})
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
    `facts.BEYOND` that it converts; `head`: a layer after the last one is a head of DeepSeek-V3's kind."""

    config: Callable[[ModelMetadata], dict[str, Any]]
    names: Callable[[ModelMetadata], Names]
    handled: frozenset[str] = frozenset()
    head: bool = False


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(configs.mixtral, configs.mixtral_names),
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
    "granitemoe": Architecture(configs.granite, configs.granite_names, GRANITE),
    "granitehybrid": Architecture(configs_states.granite_hybrid, configs_states.granite_hybrid_names, GRANITE),
    "nemotron_h_moe": Architecture(
        configs_states.nemotron_h, configs_states.nemotron_h_names, SCALED | {"moe_latent_size"}
    ),
    "jamba": Architecture(configs_states.jamba, configs_states.jamba_names),
    "kimi-linear": Architecture(configs_states.kimi_linear, configs_states.kimi_linear_names, SCALED),
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
        head=True,
    ),
    "dots1": Architecture(
        configs.dots1, lambda f: Names(DENSE | QK_NORM | SHARED | CORRECTION, biases=frozenset(CORRECTION)), SCALED
    ),
    "deepseek2": Architecture(
        configs_latent.deepseek, configs_latent.deepseek_names, SCALED | {"attention.temperature_scale"}, head=True
    ),
    "deepseek32": Architecture(configs_latent.deepseek_v32, configs_latent.indexed_names, SCALED),
    "glm-dsa": Architecture(configs_latent.glm_dsa, configs_latent.indexed_names, SCALED),
    "mistral4": Architecture(
        configs_latent.mistral4, configs_latent.mistral4_names, SCALED | {"attention.temperature_scale"}
    ),
    "mimo2": Architecture(
        configs_mimo.mimo_v2, configs_mimo.mimo_v2_names, WINDOW | SCALED | {"attention.value_scale"}
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
