"""The metadata keys that an architecture has of its own, and what its config says under other names."""

import math
from collections.abc import Callable
from typing import Any

import gguf

Config = dict[str, Any]


SIGMOID = int(gguf.ExpertGatingFuncType.SIGMOID)


GATED: Config = {"expert_gating_func": SIGMOID}


SAME = {  # GGUF's key = where an architecture's config has it
    "qwen2moe": "expert_shared_feed_forward_length=shared_expert_intermediate_size",
    "gpt-oss": "attention.sliding_window=sliding_window expert_feed_forward_length=intermediate_size",
    "minimax-m2": "expert_feed_forward_length=intermediate_size",
    "granitemoe": """attention.scale=attention_multiplier embedding_scale=embedding_multiplier
        residual_scale=residual_multiplier logit_scale=logits_scaling""",
    "grouped": "expert_weights_scale=routed_scaling_factor",
    "indexer": """attention.indexer.head_count=index_n_heads attention.indexer.key_length=index_head_dim
        attention.indexer.top_k=index_topk""",
    "ernie4_5-moe": """interleave_moe_layer_step=moe_layer_interval leading_dense_block_count=moe_layer_start_index
        expert_shared_count=moe_num_shared_experts""",
    "lfm2moe": "leading_dense_block_count=num_dense_layers shortconv.l_cache=conv_L_cache",
    "linear": """expert_shared_feed_forward_length=shared_expert_intermediate_size
        ssm.conv_kernel=linear_conv_kernel_dim ssm.state_size=linear_key_head_dim ssm.group_count=linear_num_key_heads
        ssm.time_step_rank=linear_num_value_heads""",
    "gemma4": """embedding_length_per_layer_input=hidden_size_per_layer_input attention.sliding_window=sliding_window
        attention.key_length_swa=head_dim_swa attention.value_length_swa=head_dim_swa
        rope.dimension_count_swa=head_dim_swa""",
    "llama4": "interleave_moe_layer_step=interleave_moe_layer_step",
    "hunyuan-moe": """expert_feed_forward_length=intermediate_size
        expert_shared_feed_forward_length=intermediate_size""",
    "exaone-moe": "attention.sliding_window=sliding_window",
    "afmoe": """expert_shared_count=num_shared_experts leading_dense_block_count=num_dense_layers
        expert_weights_scale=route_scale attention.sliding_window=sliding_window""",
    "nemotron_h_moe": """attention.layer_norm_epsilon=layer_norm_epsilon
        attention.layer_norm_rms_epsilon=layer_norm_epsilon ssm.conv_kernel=conv_kernel ssm.state_size=ssm_state_size
        ssm.group_count=n_groups ssm.time_step_rank=mamba_num_heads expert_shared_count=n_shared_experts
        expert_shared_feed_forward_length=moe_shared_expert_intermediate_size expert_weights_norm=norm_topk_prob
        expert_weights_scale=routed_scaling_factor moe_latent_size=moe_latent_size""",
    "granitehybrid": """ssm.conv_kernel=mamba_d_conv ssm.state_size=mamba_d_state ssm.group_count=mamba_n_groups
        ssm.time_step_rank=mamba_n_heads""",
    "jamba": "ssm.conv_kernel=mamba_d_conv ssm.state_size=mamba_d_state ssm.time_step_rank=mamba_dt_rank",
    "mimo2": """attention.sliding_window=sliding_window attention.value_length=v_head_dim
        attention.value_scale=attention_value_scale""",
    "kimi-linear": """ssm.conv_kernel=linear_conv_kernel_dim kda.head_dim=linear_head_dim
        rope.dimension_count=qk_rope_head_dim expert_shared_count=num_shared_experts
        expert_weights_scale=routed_scaling_factor""",
}


DBRX = """num_hidden_layers=n_layers max_position_embeddings=max_seq_len hidden_size=d_model num_attention_heads=n_heads
    intermediate_size=ffn_config.ffn_hidden_size num_key_value_heads=attn_config.kv_n_heads
    num_experts=ffn_config.moe_num_experts num_experts_per_tok=ffn_config.moe_top_k"""
"""Transformers' usual name = where DBRX's config has it."""


def pairs(words: str) -> list[list[str]]:
    return [word.split("=") for word in words.split()]


def same(name: str, config: Config) -> Config:
    """What files say as the config does."""
    return {key: config[where] for key, where in pairs(SAME[name])}


def _within(config: Config, path: str) -> Any:
    for key in path.split("."):
        config = config[key]
    return config


def heads_in(kind: str, config: Config, kinds: str = "layer_types") -> list[int]:
    """Key heads of each layer: only layers of this kind have some."""
    return [config["num_key_value_heads"] * (one == kind) for one in config[kinds]]


def _gemma4_heads(config: Config) -> Config:
    heads, full = config["num_key_value_heads"], config.get("num_global_key_value_heads")
    if full:
        heads = [heads if kind == "sliding_attention" else full for kind in config["layer_types"]]
    return {"head_dim": config["global_head_dim"], "head_dim_swa": config["head_dim"], "num_key_value_heads": heads}


def _llama4_widths(config: Config) -> Config:
    return {"intermediate_size": config["intermediate_size_mlp"], "moe_intermediate_size": config["intermediate_size"]}


NAMES: dict[str, Callable[[Config], Config]] = {  # what configs say under other names
    "dbrx": lambda config: {name: _within(config, path) for name, path in pairs(DBRX)},
    "lfm2moe": lambda config: {"num_key_value_heads": heads_in("full_attention", config)},
    "gemma4": _gemma4_heads,
    "llama4": _llama4_widths,
    **dict.fromkeys(
        ("deepseek2", "deepseek32", "glm-dsa", "mistral4"), lambda config: {"num_key_value_heads": 1, "head_dim": None}
    ),
}


def _slides(config: Config) -> list[bool]:
    return [kind == "sliding_attention" for kind in config["layer_types"]]


def _granite_scales(config: Config) -> Config:
    shared = config.get("shared_intermediate_size")
    return same("granitemoe", config) | ({"expert_shared_feed_forward_length": shared} if shared else {})


def _grouped(config: Config) -> Config:
    found = same("grouped", config) | {
        "expert_shared_count": config.get("n_shared_experts", config.get("num_shared_experts")),
        "leading_dense_block_count": _dense_lead(config),
    }
    if config["norm_topk_prob"]:
        found["expert_weights_norm"] = True
    # the others' "scoring_func" is "sigmoid"
    return found if config["model_type"] in ("deepseek_v2", "mistral4") else found | GATED


def _dense_lead(config: Config) -> int:
    if "first_k_dense_replace" in config:
        return int(config["first_k_dense_replace"])
    kinds: list[str] = config["mlp_layer_types"]
    return kinds.index("sparse")


def _latent_widths(config: Config) -> Config:
    rank, rotated = config["kv_lora_rank"], config["qk_rope_head_dim"]
    return {
        "attention.kv_lora_rank": rank,
        "attention.key_length": rank + rotated,
        "attention.key_length_mla": config["qk_nope_head_dim"] + rotated,
        "attention.value_length_mla": config["v_head_dim"],
    }


def _latent(config: Config) -> Config:
    """DeepseekV2Model.set_gguf_parameters."""
    found = _grouped(config) | _latent_widths(config) | {"attention.value_length": config["kv_lora_rank"]}
    if config["q_lora_rank"]:
        found["attention.q_lora_rank"] = config["q_lora_rank"]
    if "mscale_all_dim" in config["rope_parameters"]:
        found["rope.scaling.yarn_log_multiplier"] = 0.1 * config["rope_parameters"]["mscale_all_dim"]
    return found


def _indexed(config: Config) -> Config:
    found = _latent(config) | same("indexer", config)
    if "indexer_types" in config:
        found["attention.indexer.types"] = [kind == "full" for kind in config["indexer_types"]]
    return found


def _mistral(config: Config) -> Config:
    return _latent(config) | {"attention.temperature_scale": config["rope_parameters"]["llama_4_scaling_beta"]}


def _ernie(config: Config) -> Config:
    width = config["moe_num_shared_experts"] * config["moe_intermediate_size"]
    return {"expert_shared_feed_forward_length": width}


def _linear(config: Config) -> Config:
    inner = config["linear_value_head_dim"] * config["linear_num_value_heads"]
    found = same("linear", config) | {"ssm.inner_size": inner, "full_attention_interval": 4}
    sections = {"rope.dimension_sections": [11, 11, 10, 0]}
    return found | (sections if config["model_type"] == "qwen3_5_moe_text" else {})


def _gemma4(config: Config) -> Config:
    cap = config["final_logit_softcapping"]
    found: Config = {"attention.shared_kv_layers": 0, "attention.sliding_window_pattern": _slides(config)}
    return found | ({"final_logit_softcapping": cap} if cap else {})


def _exaone(config: Config) -> Config:
    return _grouped(config) | {"attention.sliding_window_pattern": _slides(config), "rope.scaling.type": "none"}


def _phi(config: Config) -> Config:
    found = {"attention.sliding_window": config["sliding_window"] or 0}
    if original := config["rope_parameters"].get("original_max_position_embeddings"):
        ratio = config["max_position_embeddings"] / original
        factor = math.sqrt(1 + math.log(ratio) / math.log(original))
        found |= {"rope.scaling.original_context_length": original, "rope.scaling.attn_factor": factor}
    return found


def _nemotron(config: Config) -> Config:
    """GraniteHybridModel's, then NemotronHModel's. Its config.json says the norms' epsilon as norm_eps, too."""
    kinds, width = config["layers_block_type"], config["moe_intermediate_size"]
    return UNTURNED | {
        "attention.head_count_kv": heads_in("full_attention", config, "layers_block_type"),
        "feed_forward_length": [width * (kind == "moe") for kind in kinds],
        "ssm.inner_size": config["mamba_num_heads"] * config["mamba_head_dim"],
    }


def _granite_hybrid(config: Config) -> Config:
    inner = config["mamba_expand"] * config["hidden_size"]
    heads = heads_in("full_attention", config)
    return _granite_scales(config) | UNTURNED | {"attention.head_count_kv": heads, "ssm.inner_size": inner}


def _jamba(config: Config) -> Config:
    offset, period = config["attn_layer_offset"], config["attn_layer_period"]
    attends = [n >= offset and (n - offset) % period == 0 for n in range(config["num_hidden_layers"])]
    heads = [config["num_key_value_heads"] * here for here in attends]
    return {"attention.head_count_kv": heads, "ssm.inner_size": config["mamba_expand"] * config["hidden_size"]}


def _mimo(config: Config) -> Config:
    ahead = 3
    slides = [*map(int, _slides(config)), *[1] * ahead]
    return GATED | {
        "block_count": config["num_hidden_layers"] + ahead,
        "nextn_predict_layers": ahead,
        "attention.head_count_kv": [config["num_key_value_heads"] * (1 + here) for here in slides],
        "attention.sliding_window_pattern": slides,
    }


def _kimi(config: Config) -> Config:
    heads = [int(kind == "full_attention") for kind in config["layer_types"]]
    lead = {"attention.head_count_kv": heads, "leading_dense_block_count": _dense_lead(config)}
    return _latent_widths(config) | GATED | lead


UNTURNED: Config = {"context_length": 1 << 20, "rope.scaling.finetuned": False}  # of models without rotary embedding


UNSCALED: Config = {"expert_shared_count": 1, "rope.scaling.type": "none", "rope.scaling.factor": 1.0}


OWN: dict[str, Callable[[Config], Config]] = {
    "granitemoe": _granite_scales,
    **dict.fromkeys(("glm4moe", "dots1", "bailingmoe2"), _grouped),
    "deepseek2": _latent,
    **dict.fromkeys(("deepseek32", "glm-dsa"), _indexed),
    "mistral4": _mistral,
    "ernie4_5-moe": _ernie,
    **dict.fromkeys(("minimax-m2", "lfm2moe", "llama4"), lambda config: GATED),
    **dict.fromkeys(("qwen35moe", "qwen3next"), _linear),
    "gemma4": _gemma4,
    "hunyuan-moe": lambda config: UNSCALED,
    "exaone-moe": _exaone,
    "phimoe": _phi,
    "afmoe": lambda config: GATED | {"expert_weights_norm": True},
    "dbrx": lambda config: {
        "attention.clamp_kqv": config["attn_config"]["clip_qkv"],
        "attention.layer_norm_epsilon": 1e-5,
    },
    "nemotron_h_moe": _nemotron,
    "granitehybrid": _granite_hybrid,
    "jamba": _jamba,
    "mimo2": _mimo,
    "kimi-linear": _kimi,
}
