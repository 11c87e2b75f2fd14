"""What llama.cpp's converter does to the weights of particular architectures, beyond renaming them."""

from __future__ import annotations

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


CONVERT: dict[str, Callable[[Config, str, str, torch.Tensor], Named | torch.Tensor]] = {
    "qwen35moe": _qwen35,
    "qwen3next": _qwen3_next,
}
"""By ggml's name: a checkpoint's tensor changed, to be renamed by gguf's own map; or GGUF's
tensors made of it. Given the config, the tensor's name, what the names of its layer begin with in GGUF, and the tensor."""
