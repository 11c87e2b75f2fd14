"""What llama.cpp's converter does to the weights of a checkpoint: renamed, cut apart, stacked, stored otherwise."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable

import gguf
import torch

from tests.gguf_writer.keys import Config, layers_of

Named = list[tuple[str, torch.Tensor]]
ARCH = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}
MAPPED = {"deepseek32": "glm-dsa"}
"""Architectures that the installed gguf package does not know -> one with the same names."""
PAIRED = ("llama", "granitemoe", "granitehybrid")
"""Whose queries and keys turn pairs of rows, not halves."""


def convert(ggml: str, config: Config, key: str, tensor: torch.Tensor) -> Named:
    """One checkpoint tensor as llama.cpp stores it; experts still one by one, as "...experts.E.gate_proj.weight"."""
    layer = next(iter(re.findall(r"\.(?:layers|blocks)\.(\d+)\.", key)), "")
    blk = f"blk.{layer}."
    if ggml in CONVERT:
        changed = CONVERT[ggml](config, key, blk, tensor)
        if isinstance(changed, list):
            return changed
        tensor = changed
    if re.search(r"\.experts\.\d+\.", key):
        return [(key, tensor)]
    if ggml in PAIRED and re.search(r"self_attn\.[qk]_proj", key):
        heads = config["num_attention_heads" if ".q_proj" in key else "num_key_value_heads"]
        tensor = tensor.reshape(heads, 2, -1, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)
    if key.endswith("input_linear.weight"):
        return _halves(blk, "exps" if "sparse" in key else "shexp", tensor)
    if key.endswith("experts.gate_up_proj") and ggml == "deepseek2":  # Mistral's own format has them apart
        return _halves(blk, "exps", tensor)
    if key.endswith("kv_b_proj.weight"):
        parts = tensor.view(config["num_attention_heads"], -1, tensor.shape[-1])
        k, v = parts.split([config["qk_nope_head_dim"], config["v_head_dim"]], dim=1)
        return [(f"{blk}attn_k_b.weight", k.transpose(1, 2)), (f"{blk}attn_v_b.weight", v)]
    if key.endswith(("experts.gate_up_proj", "experts.down_proj")):
        key += ".weight"
    key = key.replace("e_score_correction_bias", "e_score_correction.bias")
    key = key.replace("feed_forward.expert_bias", "feed_forward.expert_bias.bias")
    key += ".weight" if key.endswith(("sinks", "attention_sink_bias")) else ""
    key = re.sub(r"block_sparse_moe\.(gate|up|down)_proj", r"mlp.\1_proj", key)  # as Kimi's own checkpoint has it
    key = re.sub(r"\.dt_bias$", ".dt.bias" if ggml == "nemotron_h_moe" else ".dt_proj.bias", key)
    tensor = _state(ggml, config, key, tensor)
    name = _names(ggml, layers_of(config)).get_name(key, try_suffixes=(".weight", ".bias"))
    assert name is not None, key
    return [(name, tensor[0] if key.endswith("shared_expert_gate.weight") else tensor)]


@functools.cache
def _names(ggml: str, layers: int) -> gguf.TensorNameMap:
    return gguf.get_tensor_name_map(ARCH[MAPPED.get(ggml, ggml)], layers)


def _halves(blk: str, kind: str, tensor: torch.Tensor) -> Named:
    halves = zip(("gate", "up"), tensor.chunk(2, dim=-2), strict=True)
    return [(f"{blk}ffn_{part}_{kind}.weight", half) for part, half in halves]


def _state(ggml: str, config: Config, key: str, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of a layer that keeps a state, as it is stored."""
    if key.endswith("_log"):
        tensor = -torch.exp(tensor)
    if ggml == "kimi-linear" and "_conv1d" in key:
        return tensor.reshape(1, tensor.shape[0], 1, tensor.shape[-1])
    if key.endswith(("conv1d.weight", "conv.conv.weight")) and tensor.dim() == 3:
        return tensor.squeeze(1)
    if ggml in ("nemotron_h_moe", "granitehybrid"):
        if key.endswith((".A_log", ".D")):
            return tensor.reshape(-1, 1)
        if key.endswith(("mixer.norm.weight", "mamba.norm.weight")):
            return tensor.reshape(config["n_groups" if "n_groups" in config else "mamba_n_groups"], -1)
    return tensor


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
    return [(f"{blk}attn_qkv.weight", torch.cat((query, key_rows, value))), (f"{blk}attn_gate.weight", gate)]


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


def _gpt_oss(config: Config, key: str, blk: str, tensor: torch.Tensor) -> Named | torch.Tensor:
    if ".experts." not in key:
        return tensor
    end, tensor = ("bias", tensor) if key.endswith("_bias") else ("weight", tensor.transpose(-1, -2))
    if "down_proj" in key:
        return [(f"{blk}ffn_down_exps.{end}", tensor)]
    return [(f"{blk}ffn_{part}_exps.{end}", tensor[:, start::2]) for start, part in ((0, "gate"), (1, "up"))]


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
    if "global_head_dim" in config:
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
    "gpt-oss": _gpt_oss,
    **dict.fromkeys(("bailingmoe2", "exaone-moe", "afmoe"), _correction),
}
"""By ggml's name: a checkpoint's tensor changed, to be renamed by gguf's own map; or GGUF's tensors made of it. Given
the config, the tensor's name, what the names of its layer begin with in GGUF, and the tensor."""
