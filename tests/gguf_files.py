"""Tiny GGUF files, made of tiny checkpoints as llama.cpp's converter makes them. Names come from gguf's own map."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import load_file, save_file

from tests.architectures.trial import random_model
from tests.checkpoints import make_checkpoint
from tests.gguf_blocks import blocks
from tests.gguf_converters import CONVERT, rope_factors
from tests.gguf_metadata import ARCH, add_metadata, layers_of
from tests.gguf_others import OTHERS, keys
from tests.gguf_others import convert as convert_other

T = gguf.GGMLQuantizationType
PERIOD = ["linear_attention"] * 3 + ["full_attention"]
ARCHITECTURES: dict[
    str, dict[str, Any]
] = {  # transformers' name (or `model`) -> ggml's, and what the checkpoint is made with
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
    "qwen3_5_moe_text": dict(ggml="qwen35moe", layer_types=PERIOD, num_hidden_layers=4, linear_num_value_heads=6),
    "qwen3_next": dict(ggml="qwen3next", layer_types=PERIOD, num_hidden_layers=4),
    "gemma4_text": dict(ggml="gemma4", global_head_dim=16),
    "gemma4_26b": dict(
        ggml="gemma4",
        model="gemma4_text",
        global_head_dim=32,
        attention_k_eq_v=True,
        num_global_key_value_heads=1,
        hidden_size_per_layer_input=0,
        final_logit_softcapping=30.0,
    ),
    "llama4_text": dict(
        ggml="llama4",
        interleave_moe_layer_step=2,
        attention_chunk_size=8192,
        rope_parameters=dict(
            rope_type="llama3",
            rope_theta=5e5,
            factor=16.0,
            low_freq_factor=1.0,
            high_freq_factor=1.0,
            original_max_position_embeddings=8192,
        ),
    ),
    "hunyuan_v1_moe": dict(
        ggml="hunyuan-moe", rope_parameters=dict(rope_type="dynamic", rope_theta=10000.0, alpha=1000.0, factor=1.0)
    ),
    "sarvam_moe": dict(
        ggml="bailingmoe2",
        rope_parameters=dict(rope_type="default", rope_theta=6e5, partial_rotary_factor=0.5),
        topk_group=1,
    ),
    "exaone_moe": dict(ggml="exaone-moe", num_hidden_layers=4, head_dim=16, routed_scaling_factor=1.5),
    "phimoe": dict(ggml="phimoe", attention_bias=True, lm_head_bias=True, sliding_window=24),
    "phimoe_long": dict(
        ggml="phimoe",
        model="phimoe",
        max_position_embeddings=131072,
        rope_parameters=dict(
            rope_type="longrope",
            rope_theta=10000.0,
            short_factor=[1.0, 1.25, 1.5, 1.75, 2.0, 2.25, 2.5, 2.75],
            long_factor=[1.0, 2.5, 4.0, 6.0, 8.0, 12.0, 16.0, 32.0],
            short_mscale=1.243163121016122,
            long_mscale=1.243163121016122,
            original_max_position_embeddings=4096,
        ),
    ),
    "afmoe": dict(ggml="afmoe", mup_enabled=True, route_scale=2.5),
    "dbrx": dict(ggml="dbrx"),
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
    made = {**(ARCHITECTURES | OTHERS)[arch], **overrides}
    ggml, model = made.pop("ggml"), made.pop("model", arch)
    tokenizer = made.pop("more", {}) | (tokenizer or {})
    checkpoint = directory / "checkpoint"
    if arch in OTHERS:
        dtype = made.pop("dtype", torch.float32)
        random_model(model, **made).to(dtype).save_pretrained(checkpoint, max_shard_size="1GB")
    else:
        make_checkpoint(model, checkpoint, max_shard_size="1GB", **made)
    config = made | json.loads((checkpoint / "config.json").read_text())
    weights = load_file(checkpoint / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    for tensor in weights.values():
        if tensor.dim() == 1:  # norms would be all ones; so small a number of steps is exact when 1 is added
            tensor += torch.randint(-96, 96, tensor.shape, generator=generator) / 1024
    save_file(weights, checkpoint / "model.safetensors", metadata={"format": "pt"})
    return checkpoint, write_gguf(directory, ggml, config, weights, choice, tokenizer, parts)


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
    tensors, other = weights, config.get("model_type") in OTHERS
    if convert_names:
        how = convert_other if other else convert
        tensors = {
            name: tensor for key, value in weights.items() for name, tensor in how(ggml, config, key, value.float())
        }
        tensors = stack(tensors, layers_of(config)) | ({} if other else rope_factors(config))
    groups = [list(tensors)[i::parts] for i in range(parts)]
    for number, names in enumerate(groups):
        path = directory / (f"model-{number + 1:05}-of-{parts:05}.gguf" if parts > 1 else "model.gguf")
        writer = gguf.GGUFWriter(path, ggml)
        if number == 0:
            if not other:
                add_metadata(writer, ggml, config)
            for key, value in ((keys(ggml, config) if other else {}) | more).items():
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
    if ggml in CONVERT:
        layer = re.search(r"\.(?:layers|blocks)\.(\d+)\.", key)
        changed = CONVERT[ggml](config, key, f"blk.{layer[1]}." if layer else "", tensor)
        if isinstance(changed, list):
            return changed
        tensor = changed
    heads = config.get("num_attention_heads")
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
    names = gguf.get_tensor_name_map(ARCH[ggml], layers_of(config))
    name = names.get_name(key, try_suffixes=(".weight", ".bias"))
    assert name is not None, key
    return [(name, tensor[0] if tensor.dim() > 1 and tensor.shape[0] == 1 else tensor)]


def stack(tensors: dict[str, torch.Tensor], layers: int) -> dict[str, torch.Tensor]:
    """Experts' own tensors made one tensor a layer and part."""
    rest = {name: tensor for name, tensor in tensors.items() if not re.search(r"\.experts\.\d+\.", name)}
    for layer in range(layers):
        for part, kinds in (("gate", "gate_proj|w1"), ("up", "up_proj|w3"), ("down", "down_proj|w2")):
            pattern = re.compile(rf"\w+\.layers\.{layer}\..*\.experts\.(\d+)\.({kinds})\.weight")
            found = sorted((int(m[1]), name) for name in tensors if (m := pattern.fullmatch(name)))
            if found:
                rest[f"blk.{layer}.ffn_{part}_exps.weight"] = torch.stack([tensors[name] for _, name in found])
    return rest
