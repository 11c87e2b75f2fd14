"""HQQ's and torchao's states of a module as transformers stores them in safetensors.

HQQ: `HQQLinear.state_dict` and `BitPack` of hqq 0.2.8. torchao: `flatten_tensor_state_dict` of torchao 0.18, and the
docstrings of its classes; `Int4Tensor` is packed as by `pack_int4` of FBGEMM, which quantises for it.
"""

from __future__ import annotations

import json
import re
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.quantized import Packed, Tensors, Writer, Written, fp8, rounded

PACKINGS = {8: ("8bit_u8", 1), 4: ("4bit_u8", 2), 3: ("3bit_32", 10), 2: ("2bit_u8", 4), 1: ("1bit_u8", 8)}


def hqq(bits: int, group: int, axis: int = 1) -> Writer:
    """Scales and zeros of the weight's type. Zeros are from 1 on: (middle - zero) * scale then has 24 bits at most."""

    def writer(weight: torch.Tensor) -> Packed:
        grouped = weight.float().reshape((-1, group) if axis else (group, -1))
        low, high = grouped.aminmax(dim=axis, keepdim=True)
        scale = ((high - low) / ((1 << bits) - 1)).to(weight.dtype)
        zero = (-low / scale.float()).clamp(min=1).to(weight.dtype)
        codes = (grouped / scale.float() + zero.float()).round().clamp(0, (1 << bits) - 1).long()
        meant = ((codes.double() - zero.double()) * scale.double()).float().view(weight.shape)
        return Packed(hqq_state(codes, scale, zero, bits, group, axis, weight.shape), meant)

    return writer


def hqq_state(
    codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, bits: int, group: int, axis: int, shape: torch.Size
) -> Tensors:
    packing, per = PACKINGS[bits]
    padded = torch.nn.functional.pad(codes, (0, 0, 0, -len(codes) % per))
    words = sum(part << bits * (per - 1 - place) for place, part in enumerate(padded.chunk(per)))
    assert isinstance(words, torch.Tensor)
    flags = ("view_as_float", "quant_scale", "quant_zero", "offload_meta"), ("encoded_state_dict", "channel_wise")
    return {
        "W_q": words.to(torch.int32 if bits == 3 else torch.uint8),
        "scale": scale,
        "zero": zero,
        "shape": torch.tensor(shape),
        **{n: torch.tensor(v, dtype=torch.int32) for n, v in (("nbits", bits), ("group_size", group), ("axis", axis))},
        **{
            name: torch.tensor([*text.encode()], dtype=torch.uint8)
            for name, text in {
                "packing": packing,
                "unpack_view_dtype": "torch.int32" if bits == 3 else "torch.uint8",
                "compute_dtype": str(scale.dtype),
            }.items()
        },
        **{name: torch.tensor(on, dtype=torch.uint8) for on, names in enumerate(flags) for name in names},
        **{n: torch.tensor(1, dtype=torch.uint8) for n in ("stores_quant_config", "optimize", "round_zero")},
    }


def int4(group: int) -> Writer:
    """Int4Tensor: signed codes, the even one in the low half; (code * scale) + zero."""

    def writer(weight: torch.Tensor) -> Packed:
        grouped = weight.float().view(weight.shape[0], -1, group)
        low, high = grouped.aminmax(dim=-1, keepdim=True)
        scale = (high - low).clamp(min=1e-6) / 15
        codes = ((grouped - low) / scale).round().clamp(0, 15) - 8
        scale, zero = (t.to(weight.dtype)[..., 0] for t in (scale, low + scale * 8))
        meant = (codes.double() * scale.double()[..., None] + zero.double()[..., None]).float().view(weight.shape)
        flat = codes.view(weight.shape).to(torch.int8)
        packed = flat[:, ::2] & 15 | flat[:, 1::2] << 4
        return Packed(flattened(qdata=packed, scale=scale.t(), zero_point=zero.t()), meant)

    return writer


def integers(bits: int, group: int = -1, symmetric: bool = True) -> Writer:
    """Int8Tensor, with scales in fp32, or IntxUnpackedToInt8Tensor, with scales of the weight's type."""

    def writer(weight: torch.Tensor) -> Packed:
        codes, points, scale = rounded(weight, bits, group, symmetric)
        scale, middle = scale.float() if bits == 8 else scale.to(weight.dtype), 1 << bits - 1
        groups = (codes.view(*scale.shape, -1) - points[..., None]).float()
        state = flattened(
            qdata=(codes - middle).to(torch.int8), scale=scale, zero_point=(points - middle).to(torch.int8)
        )
        return Packed(state, (groups * scale.float()[..., None]).view(weight.shape))

    return writer


def floats(weight: torch.Tensor) -> Packed:
    """Float8Tensor with a scale a row."""
    codes, meant = fp8((1, weight.shape[1]), "scale")(weight)
    return Packed(flattened(qdata=codes["weight"], scale=codes["scale"]), meant)


def flattened(**parts: torch.Tensor) -> Tensors:
    return {f"_weight_{name}": tensor for name, tensor in parts.items()}


def as_torchao(written: Written, stacked: bool = False, bits: int = 8) -> Written:
    """The same with headers that name each weight's class. `stacked`: experts in one tensor, gates above ups, as
    transformers 5 has them. `bits`: of integers that are one to a byte."""
    for file in [*written.path.glob("*.index.json")] if stacked else []:
        file.unlink()
    tensors = {file: load_file(file) for file in sorted(written.path.glob("*.safetensors"))}
    if stacked:
        whole = stack_experts({name: t for one in tensors.values() for name, t in one.items()})
        for file in tensors:
            file.unlink()
        tensors = {written.path / "model.safetensors": whole}
    headers = described({name: t for one in tensors.values() for name, t in one.items()}, bits)
    for file, one in tensors.items():
        save_file(one, file, metadata=headers)
    return written


def stack_experts(tensors: Tensors) -> Tensors:
    """`experts.3.gate_proj._weight_scale` and its like -> `experts._gate_up_proj_scale`."""
    kept: Tensors = {}
    found: dict[tuple[str, int], dict[tuple[int, str], torch.Tensor]] = {}
    for name, tensor in tensors.items():
        at = re.fullmatch(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj\._weight_(\w+)", name)
        if at is None:
            kept[name] = tensor
            continue
        parameter = "down_proj" if at[3] == "down" else "gate_up_proj"
        outputs = int(at[4] != "qdata" and is_int4(tensors, name.removesuffix(at[4])))  # the dimension of outputs
        found.setdefault((f"{at[1]}._{parameter}_{at[4]}", outputs), {})[int(at[2]), at[3]] = tensor
    for (name, outputs), parts in found.items():
        each = [
            torch.cat([parts[expert, half] for half in ("gate", "up", "down") if (expert, half) in parts], outputs)
            for expert in sorted({expert for expert, _ in parts})
        ]
        kept[name] = torch.stack(each)
    return kept


def is_int4(tensors: Tensors, prefix: str) -> bool:
    """Whether they are an Int4Tensor's: only its zero points are floats."""
    zero = tensors.get(f"{prefix}zero_point")
    return zero is not None and zero.is_floating_point()


def described(tensors: Tensors, bits: int) -> dict[str, str]:
    """The headers."""
    said: dict[str, dict[str, Any]] = {name: {"_type": "Tensor"} for name in tensors if "._" not in name}
    for name, tensor in tensors.items():
        if not name.endswith("_qdata"):
            continue
        prefix = name.removesuffix("qdata")
        data: dict[str, Any] = {"dtype": {"_type": "torch.dtype", "_data": "bfloat16"}}
        kind = "Int8Tensor"
        if tensor.dtype == torch.float8_e4m3fn:
            kind = "Float8Tensor"
        elif is_int4(tensors, prefix):
            kind, data = "Int4Tensor", {"activation_dtype": {"_type": "torch.dtype", "_data": "bfloat16"}}
        elif bits < 8:
            kind = "IntxUnpackedToInt8Tensor"
            data["target_dtype"] = {"_type": "torch.dtype", "_data": f"int{bits}"}
        if kind != "Float8Tensor":
            wide, groups = tensor.shape[-1], tensors[f"{prefix}scale"].shape[-1]
            if kind == "Int4Tensor":
                wide, groups = 2 * wide, tensors[f"{prefix}scale"].shape[-2]
            data["block_size"] = [1] * (tensor.dim() - 1) + [wide // groups]
        parts = [part for part in ("qdata", "scale", "zero_point") if f"{prefix}{part}" in tensors]
        module, _, last = prefix.removesuffix("_").rpartition("._")
        said[f"{module}.{last}"] = {"_type": kind, "_data": data, "_tensor_data_names": parts}
    return {"format": "pt", "tensor_names": json.dumps([*said])} | {name: json.dumps(one) for name, one in said.items()}
