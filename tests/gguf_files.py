"""Tiny GGUF files, made of tiny checkpoints as llama.cpp's converter makes them. Names come from gguf's own map."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file

from tests.checkpoints import make_checkpoint

T = gguf.GGMLQuantizationType
ARCHITECTURES: dict[str, dict[str, Any]] = {  # transformers' name -> ggml's, and what the checkpoint is made with
    "mixtral": dict(ggml="llama"),
    "qwen2_moe": dict(ggml="qwen2moe"),
    "qwen3_moe": dict(ggml="qwen3moe", norm_topk_prob=True),
    "olmoe": dict(ggml="olmoe"),
    "granitemoe": dict(
        ggml="granitemoe",
        attention_multiplier=0.22,
        embedding_multiplier=12.0,
        residual_multiplier=0.3,
        logits_scaling=6.0,
        tie_word_embeddings=True,
    ),
    "granitemoeshared": dict(ggml="granitemoe", attention_multiplier=0.22),
    "gpt_oss": dict(
        ggml="gpt-oss",
        max_position_embeddings=4096,
        rope_parameters=dict(
            rope_type="yarn",
            rope_theta=150000.0,
            factor=32.0,
            beta_fast=32.0,
            beta_slow=1.0,
            truncate=False,
            original_max_position_embeddings=128,
        ),
    ),
    "glm4_moe": dict(ggml="glm4moe", attention_bias=True, use_qk_norm=True, routed_scaling_factor=1.5),
    "dots1": dict(ggml="dots1", norm_topk_prob=True, routed_scaling_factor=2.5),
    "deepseek_v2": dict(ggml="deepseek2"),
    "deepseek_v3": dict(
        ggml="deepseek2",
        max_position_embeddings=4096,
        rope_parameters=dict(
            rope_type="yarn",
            rope_theta=10000.0,
            factor=40.0,
            mscale=1.0,
            mscale_all_dim=1.0,
            beta_fast=32.0,
            beta_slow=1.0,
            original_max_position_embeddings=64,
        ),
    ),
    "ernie4_5_moe": dict(ggml="ernie4_5-moe", tie_word_embeddings=True),
    "lfm2_moe": dict(ggml="lfm2moe"),
    "minimax_m2": dict(
        ggml="minimax-m2",
        rotary_dim=8,
        rope_parameters=dict(rope_type="default", rope_theta=5e6, partial_rotary_factor=0.5),
    ),
}
Choice = Callable[[str], str]
"""A GGUF tensor's name -> the type it is stored in."""


def all_f32(name: str) -> str:
    return "F32"


def experts_in(kind: str) -> Choice:
    """Matrices of routed experts in one type, the rest in F32."""
    return lambda name: kind if "_exps.weight" in name else "F32"


def make_gguf(
    arch: str,
    directory: Path,
    choice: Choice = all_f32,
    tokenizer: dict[str, Any] | None = None,
    parts: int = 1,
    **overrides: Any,
) -> tuple[Path, Path]:
    """Write a random checkpoint of `arch` and the same model as GGUF. Returns (checkpoint directory, GGUF file)."""
    made = {**ARCHITECTURES[arch], **overrides}
    ggml = made.pop("ggml")
    checkpoint = make_checkpoint(arch, directory / "checkpoint", max_shard_size="1GB", **made)
    config = json.loads((checkpoint / "config.json").read_text())
    return checkpoint, write_gguf(
        directory, ggml, config, load_file(checkpoint / "model.safetensors"), choice, tokenizer or {}, parts
    )


def write_gguf(
    directory: Path,
    ggml: str,
    config: dict[str, Any],
    weights: dict[str, torch.Tensor],
    choice: Choice,
    more: dict[str, Any],
    parts: int = 1,
    convert_names: bool = True,
) -> Path:
    """Write weights under transformers' names as a GGUF model of architecture `ggml`, with `more` metadata. Without
    `convert_names` the weights are GGUF's already."""
    tensors = weights
    if convert_names:
        tensors = {name: tensor for key, value in weights.items() for name, tensor in convert(ggml, config, key, value)}
        tensors = stack(tensors, config["num_hidden_layers"])
    groups = [list(tensors)[i::parts] for i in range(parts)]
    for number, names in enumerate(groups):
        path = directory / (f"model-{number + 1:05}-of-{parts:05}.gguf" if parts > 1 else "model.gguf")
        writer = gguf.GGUFWriter(path, ggml)
        if number == 0:
            add_metadata(writer, ggml, config)
            for key, value in more.items():
                add(writer, key, value)
        if parts > 1:
            writer.add_uint16("split.no", number)
            writer.add_uint16("split.count", parts)
            writer.add_int32("split.tensors.count", len(tensors))
        for name in names:
            kind = T[choice(name)] if tensors[name].dim() > 1 else T.F32
            data = blocks(tensors[name].float().numpy(), kind)
            writer.add_tensor(name, data, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return directory / (f"model-00001-of-{parts:05}.gguf" if parts > 1 else "model.gguf")


def add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def convert(ggml: str, config: dict[str, Any], key: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """One checkpoint tensor as llama.cpp stores it; experts still one by one, as "...experts.E.gate_proj.weight"."""
    heads = config["num_attention_heads"]
    if ggml in ("llama", "granitemoe") and re.search(r"self_attn\.[qk]_proj", key):
        count = heads if ".q_proj" in key else config["num_key_value_heads"]
        tensor = tensor.reshape(count, 2, -1, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)
    if "block_sparse_moe.input_linear" in key or "shared_mlp.input_linear" in key:
        kind = "exps" if "sparse" in key else "shexp"
        layer = key.split(".")[2]
        return [
            (f"blk.{layer}.ffn_{part}_{kind}.weight", half)
            for part, half in zip(("gate", "up"), tensor.chunk(2, dim=-2), strict=True)
        ]
    if ggml == "gpt-oss" and ".experts." in key:
        layer, bias = key.split(".")[2], key.endswith("_bias")
        tensor = tensor if bias else tensor.transpose(-1, -2)
        end = "bias" if bias else "weight"
        if "down_proj" in key:
            return [(f"blk.{layer}.ffn_down_exps.{end}", tensor)]
        return [(f"blk.{layer}.ffn_{part}_exps.{end}", tensor[:, start::2]) for start, part in ((0, "gate"), (1, "up"))]
    if ggml == "deepseek2" and "kv_b_proj" in key:
        nope, layer = config["qk_nope_head_dim"], key.split(".")[2]
        both = tensor.view(heads, nope + config["v_head_dim"], -1)
        return [
            (f"blk.{layer}.attn_k_b.weight", both[:, :nope].transpose(1, 2)),
            (f"blk.{layer}.attn_v_b.weight", both[:, nope:]),
        ]
    if re.search(r"\.experts\.\d+\.", key):
        return [(key, tensor)]
    key = key.replace("e_score_correction_bias", "e_score_correction.bias")
    key = key.replace("feed_forward.expert_bias", "feed_forward.expert_bias.bias")
    key += ".weight" if key.endswith("sinks") else ""
    if key.endswith("conv.conv.weight"):
        tensor = tensor.squeeze(1)
    names = gguf.get_tensor_name_map(ARCH[ggml], config["num_hidden_layers"])
    name = names.get_name(key, try_suffixes=(".weight", ".bias"))
    assert name is not None, key
    return [(name, tensor.reshape(-1) if "shexp" in name and tensor.shape[0] == 1 else tensor.squeeze(0))]


def stack(tensors: dict[str, torch.Tensor], layers: int) -> dict[str, torch.Tensor]:
    """Experts' own tensors made one tensor a layer and part."""
    rest = {name: tensor for name, tensor in tensors.items() if not re.search(r"\.experts\.\d+\.", name)}
    for layer in range(layers):
        for part, kinds in (("gate", "gate_proj|w1"), ("up", "up_proj|w3"), ("down", "down_proj|w2")):
            pattern = re.compile(rf"model\.layers\.{layer}\..*\.experts\.(\d+)\.({kinds})\.weight")
            found = sorted((int(m[1]), name) for name in tensors if (m := pattern.fullmatch(name)))
            if found:
                rest[f"blk.{layer}.ffn_{part}_exps.weight"] = torch.stack([tensors[name] for _, name in found])
    return rest


ARCH = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}
PLAIN_KEYS = {  # gguf writer's method -> where transformers' configs have the number
    "add_context_length": ["max_position_embeddings"],
    "add_embedding_length": ["hidden_size"],
    "add_feed_forward_length": ["intermediate_size"],
    "add_head_count": ["num_attention_heads"],
    "add_head_count_kv": ["num_key_value_heads"],
    "add_layer_norm_rms_eps": ["rms_norm_eps", "norm_eps"],
    "add_expert_count": ["num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"],
    "add_expert_used_count": ["num_experts_per_tok", "moe_k"],
    "add_expert_group_count": ["n_group"],
    "add_expert_group_used_count": ["topk_group"],
    "add_key_length": ["head_dim"],
    "add_value_length": ["head_dim"],
    "add_expert_feed_forward_length": ["moe_intermediate_size"],
    "add_vocab_size": ["vocab_size"],
}


def add_metadata(writer: gguf.GGUFWriter, ggml: str, config: dict[str, Any]) -> None:
    """The keys that llama.cpp's converter writes for this architecture."""
    writer.add_block_count(config["num_hidden_layers"])
    if ggml == "lfm2moe":
        kv = config["num_key_value_heads"]
        config = {**config, "num_key_value_heads": [kv * (kind != "conv") for kind in config["layer_types"]]}
    if ggml == "deepseek2":
        config = {**config, "num_key_value_heads": 1, "head_dim": None}
    for method, names in PLAIN_KEYS.items():
        value = next((config[n] for n in names if config.get(n) is not None), None)
        if value is not None:
            getattr(writer, method)(value)
    rope = config["rope_parameters"]
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    turned = {
        "deepseek2": config.get("qk_rope_head_dim"),
        "minimax-m2": config.get("rotary_dim"),
        "glm4moe": int(dim * rope.get("partial_rotary_factor", 0.5)),
    }
    writer.add_rope_dimension_count(turned.get(ggml) or dim)
    for token in ("bos", "eos", "pad"):
        if config.get(f"{token}_token_id") is not None:
            getattr(writer, f"add_{token}_token_id")(config[f"{token}_token_id"])
    OWN.get(ggml, lambda writer, config: None)(writer, config)


def _qwen2(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])


def _granite(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_attention_scale(config["attention_multiplier"])
    writer.add_embedding_scale(config["embedding_multiplier"])
    writer.add_residual_scale(config["residual_multiplier"])
    writer.add_logit_scale(config["logits_scaling"])
    if config.get("shared_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(config["shared_intermediate_size"])


def _grouped(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    if config["norm_topk_prob"]:
        writer.add_expert_weights_norm(True)
    if config["model_type"] != "deepseek_v2":
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def _deepseek(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    _grouped(writer, config)
    rank, rotated = config["kv_lora_rank"], config["qk_rope_head_dim"]
    if config["q_lora_rank"]:
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_kv_lora_rank(rank)
    writer.add_key_length(rank + rotated)
    writer.add_value_length(rank)
    writer.add_key_length_mla(config["qk_nope_head_dim"] + rotated)
    writer.add_value_length_mla(config["v_head_dim"])
    if "mscale_all_dim" in config["rope_parameters"]:
        writer.add_rope_scaling_yarn_log_mul(0.1 * config["rope_parameters"]["mscale_all_dim"])


def _ernie(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_interleave_moe_layer_step(config["moe_layer_interval"])
    writer.add_leading_dense_block_count(config["moe_layer_start_index"])
    writer.add_expert_shared_count(config["moe_num_shared_experts"])
    writer.add_expert_shared_feed_forward_length(config["moe_num_shared_experts"] * config["moe_intermediate_size"])


def _gpt_oss(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_sliding_window(config["sliding_window"])
    writer.add_expert_feed_forward_length(config["intermediate_size"])


def _minimax(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_expert_feed_forward_length(config["intermediate_size"])
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def _lfm2(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_leading_dense_block_count(config["num_dense_layers"])
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_shortconv_l_cache(config["conv_L_cache"])


OWN: dict[str, Callable[[gguf.GGUFWriter, dict[str, Any]], None]] = {
    "qwen2moe": _qwen2,
    "granitemoe": _granite,
    "glm4moe": _grouped,
    "dots1": _grouped,
    "deepseek2": _deepseek,
    "ernie4_5-moe": _ernie,
    "gpt-oss": _gpt_oss,
    "minimax-m2": _minimax,
    "lfm2moe": _lfm2,
}


def blocks(weights: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """Weights in a type: by gguf where it can; else valid random blocks with small scales, of the right size."""
    try:
        return gguf.quants.quantize(weights, kind)
    except NotImplementedError:
        size, _ = gguf.GGML_QUANT_SIZES[kind]
        rows = weights.reshape(-1, weights.shape[-1])
        return random_blocks(kind, rows.shape[0] * rows.shape[1] // size).reshape(*weights.shape[:-1], -1)


HALVES = {
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
    "Q8_0": (0,),
    "Q4_0": (0,),
    "Q5_0": (0,),
    "Q4_1": (0, 2),
    "Q5_1": (0, 2),
    "IQ3_S": (0,),
    "IQ3_XXS": (0,),
    "IQ2_XXS": (0,),
    "IQ2_XS": (0,),
    "IQ2_S": (0,),
    "IQ1_S": (0,),
}
"""Where blocks hold float16 numbers (ggml-common.h); every other byte may be anything."""


def random_blocks(kind: gguf.GGMLQuantizationType, count: int, seed: int = 0) -> np.ndarray:
    """uint8 [count, bytes of a block] that dequantise to small finite weights."""
    rng = np.random.default_rng(seed)
    made = rng.integers(0, 256, (count, gguf.GGML_QUANT_SIZES[kind][1]), dtype=np.uint8)
    if kind.name == "MXFP4":
        made[:, 0] = rng.integers(118, 124, count)
    for at in HALVES.get(kind.name, ()):
        made[:, at : at + 2] = (rng.standard_normal((count, 1)) * 1e-3).astype(np.float16).view(np.uint8)
    return made
