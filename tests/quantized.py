"""Small quantized checkpoints, written with each format's own library or by its documented layout, and what they mean.

Each writer packs one weight [out, in] and says, without the code under test, what it dequantises to.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import make_checkpoint

LARGE: dict[str, Any] = dict(hidden_size=256, moe_intermediate_size=128, intermediate_size=128, num_hidden_layers=2)
FEW = {
    "mixtral": {"num_local_experts": 4},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "head_dim": 32},
    "deepseek_v3": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "num_hidden_layers": 3},
}
Tensors = dict[str, torch.Tensor]
SHARD = 100  # tensors in a file: enough of them that there are several files


class Packed(NamedTuple):
    """What a weight became: tensors by what is put behind the module's (or weight's) name, and its meaning."""

    tensors: Tensors
    weight: torch.Tensor  # [out, in], in the number type that the format defines


class Written(NamedTuple):
    """A quantized checkpoint: `weights` are all tensors of the same checkpoint dequantised."""

    path: Path
    weights: Tensors


Writer = Callable[[torch.Tensor], Packed]


def write(
    arch: str,
    directory: Path,
    writers: Writer | Mapping[str, Writer],
    config: Mapping[str, Any],
    *,
    dtype: torch.dtype = torch.float16,
    **overrides: Any,
) -> Written:
    """Quantize the linear layers of a random checkpoint, routers and heads left out as everybody does; `writers` may
    choose by a pattern in the name, layers that none matches staying as they are."""
    by_name = writers if isinstance(writers, Mapping) else {"": writers}
    fields = {**LARGE, **FEW.get(arch, {}), **overrides}
    plain = make_checkpoint(arch, directory / "plain", dtype=dtype, max_shard_size="1GB", **fields)
    stored: Tensors = load_file(plain / "model.safetensors")
    tensors: Tensors = {}
    weights: Tensors = {}
    for name, tensor in stored.items():
        layer = re.search(r"layers\.\d+\..*(proj|proj_with_mqa|w\d|put_linear)\.weight$", name)
        writer = next((w for pattern, w in by_name.items() if re.search(pattern, name)), None)
        if writer and layer:
            packed = writer(tensor) if tensor.dim() == 2 else stacked([writer(t) for t in tensor])
            tensors |= {f"{name.removesuffix('weight')}{end}": t.contiguous() for end, t in packed.tensors.items()}
            weights[name] = packed.weight
        else:
            tensors[name] = weights[name] = tensor
    return finish(directory / "quantized", plain, tensors, weights, config)


def stacked(many: list[Packed]) -> Packed:
    """All experts in one tensor."""
    return Packed(
        {name: torch.stack([p.tensors[name] for p in many]) for name in many[0].tensors},
        torch.stack([p.weight for p in many]),
    )


def finish(path: Path, plain: Path, tensors: Tensors, weights: Tensors, config: Mapping[str, Any]) -> Written:
    """Write shards, their index, and the plain checkpoint's config.json with a quantization_config."""
    path.mkdir()
    where = {name: f"model-{i // SHARD + 1:05}.safetensors" for i, name in enumerate(sorted(tensors))}
    for file in set(where.values()):
        save_file({n: tensors[n] for n, f in where.items() if f == file}, path / file, metadata={"format": "pt"})
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    described = json.loads((plain / "config.json").read_text()) | {"quantization_config": dict(config)}
    (path / "config.json").write_text(json.dumps(described))
    return Written(path, weights)


def rounded(weight: torch.Tensor, bits: int, group: int, symmetric: bool) -> tuple[torch.Tensor, ...]:
    """Codes [out, in], points [out, groups] (both int64, unsigned) and scales [out, groups] fp16."""
    grouped = weight.float().view(weight.shape[0], -1, weight.shape[1] if group == -1 else group)
    top = (1 << bits) - 1
    if symmetric:
        scale = (grouped.abs().amax(-1) * 2 / top).half()
        points = torch.full(scale.shape, 1 << (bits - 1))
    else:
        low, high = grouped.aminmax(dim=-1)
        scale = ((high - low) / top).half()
        points = (-low / scale.float()).round().clamp(0, top).long()
    codes = (grouped / scale.float()[..., None] + points[..., None]).round().clamp(0, top).long()
    return codes.view(weight.shape), points, scale


def meaning(codes: torch.Tensor, points: torch.Tensor, scale: torch.Tensor, group_of: torch.Tensor) -> torch.Tensor:
    """(code - point) * scale in fp32, column by column."""
    columns = [(codes[:, i] - points[:, g]).float() * scale[:, g].float() for i, g in enumerate(group_of.tolist())]
    return torch.stack(columns, 1)


def words(codes: torch.Tensor, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Pack [n, m] into int32 [n, m * bits / 32], the first code of each word lowest, or code `order[j]` j-th."""
    per = 32 // bits
    blocks = codes.reshape(codes.shape[0], -1, per)
    total = torch.zeros(blocks.shape[:2], dtype=torch.int64)
    for place in range(per):
        total |= blocks[..., order[place] if order else place] << (bits * place)
    return torch.where(total >= 1 << 31, total - (1 << 32), total).to(torch.int32)


def gptq(
    bits: int = 4, group: int = 128, symmetric: bool = True, minus_one: bool = True, act_order: bool = False
) -> Writer:
    """AutoGPTQ's layout (`minus_one`) or GPTQModel's (gptq_v2)."""

    def writer(weight: torch.Tensor) -> Packed:
        columns = weight.shape[1]
        group_of = torch.arange(columns) // (columns if group == -1 else group)
        order = torch.randperm(columns) if act_order else torch.arange(columns)
        codes, points, scale = rounded(weight[:, order], bits, group, symmetric)
        back = order.argsort()
        codes, group_of = codes[:, back], group_of[back]
        zeros = (points - 1) % (1 << bits) if minus_one else points
        return Packed(
            {
                "qweight": words(codes, bits).t(),
                "qzeros": words(zeros.t(), bits),
                "scales": scale.t(),
                "g_idx": group_of.to(torch.int32),
            },
            meaning(codes, points, scale, group_of),
        )

    return writer


def awq(group: int = 128) -> Writer:
    """AutoAWQ's gemm layout."""
    order = (0, 2, 4, 6, 1, 3, 5, 7)

    def writer(weight: torch.Tensor) -> Packed:
        codes, points, scale = rounded(weight, 4, group, False)
        return Packed(
            {"qweight": words(codes.t(), 4, order), "qzeros": words(points.t(), 4, order), "scales": scale.t()},
            meaning(codes, points, scale, torch.arange(weight.shape[1]) // group),
        )

    return writer


def _as_it_is(function: Any = None, **_: object) -> Any:
    return function if function is not None else _as_it_is


def bnb(kind: str = "nf4", nested: bool = True, block: int = 64) -> Writer:
    """bitsandbytes 4-bit, by the bitsandbytes library."""
    with mock.patch.object(torch, "compile", _as_it_is):  # or its import brings torch's compiler, for seconds
        from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    def writer(weight: torch.Tensor) -> Packed:
        codes, state = quantize_4bit(weight.float(), blocksize=block, compress_statistics=nested, quant_type=kind)
        beside = {f"weight.{name}": tensor for name, tensor in state.as_dict(packed=True).items()}
        return Packed({"weight": codes} | beside, dequantize_4bit(codes, state))

    return writer


def fp8(block: tuple[int, int] | None = (128, 128), suffix: str = "weight_scale_inv") -> Writer:
    """FP8 with a scale a block, or a tensor; what it means is transformers' own arithmetic."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    def writer(weight: torch.Tensor) -> Packed:
        out, columns = weight.shape
        rows, wide = block or (out, columns)
        padded = torch.nn.functional.pad(weight.float(), (0, -columns % wide, 0, -out % rows))
        grid = padded.view(padded.shape[0] // rows, rows, padded.shape[1] // wide, wide)
        scale = grid.abs().amax((1, 3)) / torch.finfo(torch.float8_e4m3fn).max
        padded = (grid / scale[:, None, :, None]).view(padded.shape).to(torch.float8_e4m3fn)
        codes = padded[:out, :columns]
        meant = Fp8Dequantize(None)._dequantize_one(padded, scale, torch.bfloat16)[:out, :columns]
        return Packed({"weight": codes, suffix: scale if block else scale.view(())}, meant)

    return writer


def write_mxfp4(directory: Path) -> Written:
    """gpt_oss as OpenAI publishes it; what it means is transformers' own conversion."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    plain = make_checkpoint(
        "gpt_oss", directory / "plain", dtype=torch.bfloat16, max_shard_size="1GB", **{**LARGE, **FEW["gpt_oss"]}
    )
    weights: Tensors = load_file(plain / "model.safetensors")
    tensors = dict(weights)
    for name in [n for n in weights if n.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, out = tensors.pop(name).shape
        blocks = torch.randint(0, 256, (experts, out, columns // 32, 16), dtype=torch.uint8)
        scales = torch.randint(118, 124, (experts, out, columns // 32), dtype=torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        weights[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    kept = "layers.*.self_attn", "layers.*.mlp.router", "embed_tokens"
    config = {"quant_method": "mxfp4", "modules_to_not_convert": [f"model.{name}" for name in kept] + ["lm_head"]}
    return finish(directory / "quantized", plain, tensors, weights, config)
