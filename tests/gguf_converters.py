"""What llama.cpp's converter does to the weights of particular architectures, beyond renaming them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

Named = list[tuple[str, torch.Tensor]]
Config = dict[str, Any]


def _tiled(config: Config, width: int) -> list[int]:
    """Rows of value heads in the order that ggml repeats key heads in: the first of each key head, and so on."""
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    heads = [key * (values // keys) + n for n in range(values // keys) for key in range(keys)]
    return [head * width + row for head in heads for row in range(width)]


def _linear(config: Config, key: str, blk: str, tensor: torch.Tensor, tiled: bool) -> Named | torch.Tensor:
    width, joint = config["linear_value_head_dim"], 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"]
    name = key.removesuffix(".weight").rpartition(".")[2]
    if tiled and ".linear_attn." in key:
        if name in ("in_proj_qkv", "conv1d"):
            tensor = torch.cat((tensor[:joint], tensor[joint:][_tiled(config, width)]))
        elif name in ("in_proj_a", "in_proj_b", "A_log", "dt_bias"):
            tensor = tensor[_tiled(config, 1)]
        elif name == "in_proj_z":
            tensor = tensor[_tiled(config, width)]
        elif name == "out_proj":
            tensor = tensor[:, _tiled(config, width)]
    if name == "A_log":
        return [(f"{blk}ssm_a", -torch.exp(tensor))]
    if name == "dt_bias":
        return [(f"{blk}ssm_dt.bias", tensor)]
    if name == "conv1d":
        return tensor[:, 0]
    if key.endswith("norm.weight") and "linear_attn" not in key:
        return tensor + 1
    return tensor


def _qwen35(config: Config, key: str, blk: str, tensor: torch.Tensor) -> Named | torch.Tensor:
    return _linear(config, key, blk, tensor, tiled=True)


def _qwen3_next(config: Config, key: str, blk: str, tensor: torch.Tensor) -> Named | torch.Tensor:
    if "in_proj_qkvz" not in key:
        return _linear(config, key, blk, tensor, tiled=False)
    keys, width = config["linear_num_key_heads"], config["linear_key_head_dim"]
    wide = config["linear_num_value_heads"] // keys * config["linear_value_head_dim"]
    parts = tensor.view(keys, -1, tensor.shape[1]).split([width, width, wide, wide], dim=1)
    query, key_rows, value, gate = (part.reshape(-1, tensor.shape[1]) for part in parts)
    return [
        (f"{blk}attn_qkv.weight", torch.cat((query, key_rows, value))),
        (f"{blk}attn_gate.weight", gate),
    ]


def _gemma4(config: Config, key: str, blk: str, tensor: torch.Tensor) -> Named | torch.Tensor:
    named = {
        "router.scale": "ffn_gate_inp.scale",
        "per_expert_scale": "ffn_down_exps.scale",
        "layer_scalar": "layer_output_scale.weight",
        "gate_up_proj": "ffn_gate_up_exps.weight",
        "experts.down_proj": "ffn_down_exps.weight",
    }
    name = next((gguf for end, gguf in named.items() if key.endswith(end)), None)
    return [(f"{blk}{name}", tensor)] if name else tensor


def _llama4(config: Config, key: str, blk: str, tensor: torch.Tensor) -> Named | torch.Tensor:
    if key.endswith("gate_up_proj"):
        gate, up = tensor.transpose(1, 2).chunk(2, dim=1)
        return [(f"{blk}ffn_gate_exps.weight", gate), (f"{blk}ffn_up_exps.weight", up)]
    if key.endswith("experts.down_proj"):
        return [(f"{blk}ffn_down_exps.weight", tensor.transpose(1, 2))]
    return tensor


def _correction(config: Config, key: str, blk: str, tensor: torch.Tensor) -> Named | torch.Tensor:
    found = key.endswith(("expert_bias", "e_score_correction_bias"))
    return [(f"{blk}exp_probs_b.bias", tensor)] if found else tensor


def _dbrx(config: Config, key: str, blk: str, tensor: torch.Tensor) -> Named | torch.Tensor:
    part = {"w1": "gate", "v1": "up", "w2": "down"}.get(key.rpartition(".")[2])
    if part is None:
        return tensor
    experts = tensor.view(config["ffn_config"]["moe_num_experts"], -1, tensor.shape[1])
    return [(f"{blk}ffn_{part}_exps.weight", experts.transpose(1, 2) if part == "down" else experts)]


def _qwen3_vl(config: Config, key: str, blk: str, tensor: torch.Tensor) -> Named | torch.Tensor:
    if key.endswith("experts.gate_up_proj"):
        halves = tensor.transpose(1, 2).chunk(2, dim=1)
        return [(f"{blk}ffn_{part}_exps.weight", half) for part, half in zip(("gate", "up"), halves, strict=True)]
    return [(f"{blk}ffn_down_exps.weight", tensor.transpose(1, 2))] if key.endswith("experts.down_proj") else tensor


def _divisors(rope: Config, width: int) -> list[float]:
    """Of Llama 3's frequencies: how much slower each is for long contexts."""
    divisors = []
    for n in range(0, width, 2):
        length = 2 * math.pi * rope["rope_theta"] ** (n / width)
        low, high = (rope["original_max_position_embeddings"] / rope[f"{end}_freq_factor"] for end in ("low", "high"))
        part = 1.0 if length < high else 0.0 if length > low else (low / length - 1) / (low / high - 1)
        divisors.append(1 / ((1 - part) / rope["factor"] + part))
    return divisors


def rope_factors(config: Config) -> dict[str, torch.Tensor]:
    """The tensors that say how frequencies are stretched."""
    rope = config.get("rope_parameters") or {}
    if "full_attention" in rope:
        width, part = config["global_head_dim"], rope["full_attention"]["partial_rotary_factor"]
        turned = int(width * part / 2)
        return {"rope_freqs.weight": torch.tensor([1.0] * turned + [1e30] * (width // 2 - turned))}
    if rope.get("rope_type") == "llama3":
        width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        return {"rope_freqs.weight": torch.tensor(_divisors(rope, width))}
    return {
        f"rope_factors_{n}.weight": torch.tensor(rope[f"{n}_factor"])
        for n in ("long", "short")
        if f"{n}_factor" in rope
    }


CONVERT: dict[str, Callable[[Config, str, str, torch.Tensor], Named | torch.Tensor]] = {
    "qwen35moe": _qwen35,
    "qwen3next": _qwen3_next,
    "gemma4": _gemma4,
    "qwen3vlmoe": _qwen3_vl,
    "llama4": _llama4,
    "dbrx": _dbrx,
    **dict.fromkeys(("bailingmoe2", "exaone-moe", "afmoe"), _correction),
}
"""By ggml's name: a checkpoint's tensor changed, to be renamed by gguf's own map; or GGUF's tensors made of it. Given
the config, the tensor's name, what the names of its layer begin with in GGUF, and the tensor."""
