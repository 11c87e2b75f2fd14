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


def packed_by_compressed_tensors(bits: int, group: int, symmetric: bool) -> Writer:
    """pack-quantized, by the compressed-tensors library. `group` -1: one scale a row."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    scheme = QuantizationScheme(
        targets=["Linear"],
        weights=QuantizationArgs(
            num_bits=bits,
            group_size=None if group == -1 else group,
            symmetric=symmetric,
            strategy="channel" if group == -1 else "group",
        ),
    )
    library = BaseCompressor.get_value_from_registry("pack-quantized")

    def writer(weight: torch.Tensor) -> Packed:
        _, points, half = rounded(weight, bits, group, symmetric)
        scale, zero = half.to(weight.dtype), (points - (1 << (bits - 1))).to(torch.int8)
        tensors = library.compress({"weight": weight, "weight_scale": scale, "weight_zero_point": zero}, scheme)
        codes = unpack_from_int32(tensors["weight_packed"], bits, weight.shape)
        groups = codes.view(*scale.shape, -1).float() - zero.float()[..., None]
        meant = (groups * scale.float()[..., None]).view(weight.shape)
        assert torch.equal(library.decompress(tensors, scheme)["weight"], meant.to(scale.dtype))
        return Packed(tensors, meant)

    return writer


def bytes_by_compressed_tensors(weight: torch.Tensor) -> Packed:
    """int-quantized: int8 with a scale a row, by the compressed-tensors library."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(num_bits=8, strategy="channel"))
    library = BaseCompressor.get_value_from_registry("int-quantized")
    _, _, half = rounded(weight, 8, -1, True)
    tensors = library.compress({"weight": weight, "weight_scale": half.to(weight.dtype)}, scheme)
    return Packed(tensors, tensors["weight"].float() * tensors["weight_scale"].float())


def mxfp4_by_compressed_tensors(weight: torch.Tensor) -> Packed:
    """mxfp4-pack-quantized, by the compressed-tensors library."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    scheme = QuantizationScheme(
        targets=["Linear"],
        weights=QuantizationArgs(num_bits=4, type="float", strategy="group", group_size=32, scale_dtype=torch.uint8),
    )
    library = BaseCompressor.get_value_from_registry("mxfp4-pack-quantized")
    peak = weight.float().view(weight.shape[0], -1, 32).abs().amax(-1)
    scale = torch.exp2(torch.floor(torch.log2(peak)) - 2).to(weight.dtype)
    tensors = library.compress({"weight": weight, "weight_scale": scale}, scheme)
    return Packed(tensors, library.decompress(tensors, scheme)["weight"])


def nvfp4(weight: torch.Tensor, divisor: float | None = None) -> tuple[torch.Tensor, torch.Tensor, float, torch.Tensor]:
    """Codes uint8 [out, in] and scales of e4m3 for a weight whose scales are divided by `divisor` (where None, so that
    the largest is the largest of its type), the divisor, and what the codes stand for, before scales."""
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    grouped = weight.float().view(weight.shape[0], -1, 16)
    if divisor is None:
        divisor = float(torch.tensor(448 * 6 / float(weight.abs().max()), dtype=torch.float32))
    scale = (grouped.abs().amax(-1) / 6 * divisor).to(torch.float8_e4m3fn)
    ratio = grouped * divisor / scale.float().clamp(min=2.0**-9)[..., None]
    near = (ratio.abs()[..., None] - values).abs().argmin(-1)
    codes = (near | (ratio < 0).long() << 3).view(weight.shape).to(torch.uint8)
    return codes, scale, divisor, torch.cat((values, -values))[codes.long()].view(grouped.shape)


def nvfp4_by_compressed_tensors(weight: torch.Tensor) -> Packed:
    """nvfp4-pack-quantized, whose decompression is that of the compressed-tensors library. The divisor is a power of
    two, so that to divide by it and to multiply by its reciprocal is the same."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    arguments = QuantizationArgs(num_bits=4, type="float", strategy="tensor_group", group_size=16, symmetric=True)
    scheme = QuantizationScheme(targets=["Linear"], weights=arguments)
    codes, scale, divisor, values = nvfp4(weight, 2.0 ** (14 - int(weight.abs().max().log2().ceil())) / 16)
    tensors = {
        "weight_packed": codes[:, ::2] | codes[:, 1::2] << 4,
        "weight_scale": scale,
        "weight_global_scale": torch.tensor([divisor]),
        "input_global_scale": torch.tensor([3.0]),
    }
    library = BaseCompressor.get_value_from_registry("nvfp4-pack-quantized")
    meant = (values * (scale.float() / divisor)[..., None]).view(weight.shape)
    given = {name: tensor for name, tensor in tensors.items() if name.startswith("weight")}
    decompressed = library.decompress(given, scheme)["weight"]
    assert torch.equal(decompressed.float(), meant.to(decompressed.dtype).float())
    return Packed(tensors, meant)


def nvfp4_by_modelopt(weight: torch.Tensor, scaled_inputs: bool = False) -> Packed:
    """ModelOpt's layout: the factor of scales; of NVFP4_AWQ also that of inputs."""
    codes, scale, divisor, values = nvfp4(weight)
    factor = torch.tensor(1 / divisor, dtype=torch.float32)
    tensors = {
        "weight": codes[:, ::2] | codes[:, 1::2] << 4,
        "weight_scale": scale,
        "weight_scale_2": factor,
        "input_scale": torch.tensor(0.01),
    }
    return _scaled(tensors, (values * (scale.float() * factor)[..., None]).view(weight.shape), scaled_inputs)


def int4_by_modelopt(weight: torch.Tensor, scaled_inputs: bool = False) -> Packed:
    """W4A16_AWQ in ModelOpt's layout: signed codes, two outputs in a byte."""
    codes, _, scale = rounded(weight, 4, 128, True)
    signed = (codes.to(torch.int16) - 8) & 15
    tensors = {"weight": (signed[::2] | signed[1::2] << 4).to(torch.uint8), "weight_scale": scale.to(weight.dtype)}
    groups = (codes.float() - 8).view(*scale.shape, -1)
    meant = (groups * tensors["weight_scale"].float()[..., None]).view(weight.shape)
    return _scaled(tensors, meant, scaled_inputs)


def _scaled(tensors: Tensors, meant: torch.Tensor, inputs: bool) -> Packed:
    if not inputs:
        return Packed(tensors, meant)
    scale = torch.linspace(0.5, 2, meant.shape[1]).bfloat16()
    return Packed(tensors | {"pre_quant_scale": scale}, meant * scale.float())


def fp8_blocks_by_modelopt(weight: torch.Tensor) -> Packed:
    """FP8_PB_WO: a scale for 128 x 128, stored with two dimensions of one number."""
    packed = fp8((128, 128), "weight_scale")(weight)
    scale = packed.tensors["weight_scale"]
    return Packed(packed.tensors | {"weight_scale": scale[:, None, :, None]}, packed.weight)


def mxfp4_by_quark(weight: torch.Tensor) -> Packed:
    """AMD Quark's layout of MXFP4: that of compressed-tensors under other names."""
    packed = mxfp4_by_compressed_tensors(weight)
    codes, scale = packed.tensors["weight_packed"], packed.tensors["weight_scale"]
    return Packed({"weight": codes, "weight_scale": scale.view(torch.uint8)}, packed.weight)


def mlx(bits: int = 4, group: int = 64) -> Writer:
    """MLX's affine layout: code * scale + bias, the lowest code first in words of 32 bits."""

    def writer(weight: torch.Tensor) -> Packed:
        grouped = weight.float().view(weight.shape[0], -1, group)
        low, high = grouped.aminmax(dim=-1)
        scale = ((high - low) / ((1 << bits) - 1)).to(weight.dtype)
        bias = (scale.float() * (low / scale.float()).round()).to(weight.dtype)
        codes = ((grouped - bias.float()[..., None]) / scale.float()[..., None]).round().clamp(0, (1 << bits) - 1)
        meant = (codes.double() * scale.double()[..., None] + bias.double()[..., None]).float().view(weight.shape)
        stream = codes.view(weight.shape[0], -1, 1).long() >> torch.arange(bits) & 1  # bits in order
        words_ = (stream.view(weight.shape[0], -1, 32) << torch.arange(32)).sum(-1).to(torch.uint32)
        return Packed({"weight": words_, "scales": scale, "biases": bias}, meant)

    return writer


def mlx_floats(mode: str) -> Writer:
    """MLX's modes mxfp4 and nvfp4."""

    def writer(weight: torch.Tensor) -> Packed:
        if mode == "mxfp4":
            packed = mxfp4_by_compressed_tensors(weight)
            codes, scale, meant = packed.tensors["weight_packed"], packed.tensors["weight_scale"], packed.weight
        else:
            nibbles, scale, _, values = nvfp4(weight, 1.0)
            codes = nibbles[:, ::2] | nibbles[:, 1::2] << 4
            meant = (values * scale.float()[..., None]).view(weight.shape)
        return Packed({"weight": codes.contiguous().view(torch.uint32), "scales": scale.view(torch.uint8)}, meant)

    return writer


def as_mlx(written: Written) -> Written:
    """The same with experts stacked and settings named as mlx-lm does."""
    tensors = {name: t for file in written.path.glob("*.safetensors") for name, t in load_file(file).items()}
    stacks: dict[str, list[torch.Tensor]] = {}
    for name in sorted(tensors, key=lambda one: [int(n) for n in re.findall(r"\d+", one)]):
        if ".experts." in name:
            stacks.setdefault(re.sub(r"\.experts\.\d+\.", ".switch_mlp.", name), []).append(tensors.pop(name))
    for file in written.path.glob("*.safetensors*"):
        file.unlink()
    tensors |= {name: torch.stack(many) for name, many in stacks.items()}
    save_file(tensors, written.path / "model.safetensors", metadata={"format": "mlx"})
    file = written.path / "config.json"
    config = json.loads(file.read_text())
    stated = config["quantization_config"]
    file.write_text(json.dumps(config | {"quantization": stated}))
    return written


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
    config = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
    }
    return finish(directory / "quantized", plain, tensors, weights, config)
