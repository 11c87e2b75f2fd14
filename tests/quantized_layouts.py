"""The layouts of compressed-tensors, by its own library, and of ModelOpt, Quark and MLX."""

from __future__ import annotations

import json
import re
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.quantized import Packed, Tensors, Writer, Written, fp8, rounded


def compressor(layout: str, **weights: Any) -> tuple[Any, Any]:
    """The library's compressor of a layout, and the scheme that says how `weights` are quantised."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))
    return BaseCompressor.get_value_from_registry(layout), scheme


def packed_by_compressed_tensors(bits: int, group: int, symmetric: bool) -> Writer:
    """pack-quantized, by the compressed-tensors library. `group` -1: one scale a row."""
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

    sizes = {"strategy": "channel"} if group == -1 else {"strategy": "group", "group_size": group}
    library, scheme = compressor("pack-quantized", num_bits=bits, symmetric=symmetric, **sizes)

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
    library, scheme = compressor("int-quantized", num_bits=8, strategy="channel")
    _, _, half = rounded(weight, 8, -1, True)
    tensors = library.compress({"weight": weight, "weight_scale": half.to(weight.dtype)}, scheme)
    return Packed(tensors, tensors["weight"].float() * tensors["weight_scale"].float())


def mxfp4_by_compressed_tensors(weight: torch.Tensor) -> Packed:
    """mxfp4-pack-quantized, by the compressed-tensors library."""
    floats = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": torch.uint8}
    library, scheme = compressor("mxfp4-pack-quantized", **floats)
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
    floats = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}
    library, scheme = compressor("nvfp4-pack-quantized", **floats)
    codes, scale, divisor, values = nvfp4(weight, 2.0 ** (14 - int(weight.abs().max().log2().ceil())) / 16)
    tensors = {
        "weight_packed": codes[:, ::2] | codes[:, 1::2] << 4,
        "weight_scale": scale,
        "weight_global_scale": torch.tensor([divisor]),
        "input_global_scale": torch.tensor([3.0]),
    }
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
