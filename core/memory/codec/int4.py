"""4 bits a weight: groups along the input dimension, each with a scale and a zero point.

A matrix is kept as [out, in] however the model stores it. Two codes share a byte, the even input in the low half, as in
compressed-tensors' pack-quantized; weight = (code - 8) * scale + zero, as in torch's int4 kernels.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from core.errors import ModelError
from core.memory.codec.base import Base, Layout, PartSpec, SlotParts

CLIPS = (1.0, 0.95, 0.9, 0.85)  # shares of a group's range tried; smaller ones gain nothing measurable at 4 bits
CHUNK = 1 << 18                             # weights quantised at a time on a CPU: what stays in its cache


class Int4(Base):
    """The portable form: slots hold the blob's bytes; products dequantise first."""

    name = "int4"

    def __init__(self, specs: Mapping[str, PartSpec], dtype: torch.dtype, device: torch.device, is_transposed: bool,
                 group_size: int) -> None:
        super().__init__(specs, dtype, device, is_transposed)
        self.group_size = group_size
        fields = self.bias_fields()
        for part in self.weights:
            out, columns = self.out_in(part)
            if columns % group_size:
                sizes = [str(g) for g in (128, 64, 32) if g < group_size and columns % g == 0]
                raise ModelError(f"int4 in groups of {group_size} does not divide this model's {columns} inputs. "
                                 f"Choose {'group size ' + ' or '.join(sizes) if sizes else 'the format int8'}.")
            groups = (dtype, (out, columns // group_size))
            fields |= {f"{part}.q": (torch.uint8, (out, columns // 2)), f"{part}.scale": groups, f"{part}.zero": groups}
        self.blob_layout = self.slot_layout = Layout.of(fields)

    def encode(self, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        blob, views = self.begin_blob(parts)
        for name in self.weights:
            weight = self.rows(parts[name])
            step = max(1, CHUNK // weight.shape[1]) if self.device.type == "cpu" else weight.shape[0]
            for start in range(0, weight.shape[0], step):
                codes, scale, zero = quantize(weight[start : start + step], self.group_size, self.dtype)
                at = slice(start, start + step)
                views[f"{name}.q"][at].copy_(codes[:, ::2] | (codes[:, 1::2] << 4))
                views[f"{name}.scale"][at].copy_(scale)
                views[f"{name}.zero"][at].copy_(zero)
        return blob

    def views(self, slot: torch.Tensor) -> SlotParts:
        tensors = self.slot_layout.views(slot)
        weights = {n: (tensors[f"{n}.q"], tensors[f"{n}.scale"], tensors[f"{n}.zero"]) for n in self.weights}
        return SlotParts(weights, {n: tensors[n] for n in self.biases})

    def linear(self, parts: SlotParts, part: str, x: torch.Tensor) -> torch.Tensor:
        return torch.mm(x, self.weight(parts.weights[part]).t())

    def dequantize(self, parts: SlotParts, part: str) -> torch.Tensor:
        weight = self.weight(parts.weights[part])
        return weight.t() if self.is_transposed else weight

    def weight(self, tensors: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """[out, in] in the compute dtype."""
        q, scale, zero = tensors
        codes = torch.empty(*q.shape, 2, dtype=torch.uint8, device=q.device)
        torch.bitwise_and(q, 15, out=codes[..., 0])
        torch.bitwise_right_shift(q, 4, out=codes[..., 1])
        return dequantize(codes.view(q.shape[0], -1), scale, zero)


def dequantize(codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    """(code - 8) * scale + zero: codes [out, in] uint8, both others [out, in / group] -> [out, in] in scale's dtype."""
    out, groups = scale.shape
    shift = torch.sub(zero.float(), scale.float(), alpha=8)[..., None]
    grouped = codes.view(out, groups, -1).float()
    return torch.addcmul(shift, grouped, scale.float()[..., None]).to(scale.dtype).view(out, -1)


def quantize(weight: torch.Tensor, group: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Round [out, in] fp32 to codes [out, in] uint8, scale and zero [out, in / group] in `dtype`.

    Of a few ranges clipped by CLIPS, each group takes the one with the least squared error; scale and zero are rounded
    to `dtype` before the codes are chosen, so storing them costs no accuracy.
    """
    grouped = weight.view(weight.shape[0], -1, group)
    low, high = grouped.aminmax(dim=-1, keepdim=True)
    best = [torch.empty(0)] * 4
    for clip in CLIPS:
        scale = ((high - low) * (clip / 15)).clamp_(min=1e-7).to(dtype).float()
        zero = (low * clip + 8 * scale).to(dtype).float()
        codes = ((grouped - zero) / scale).round_().clamp_(-8, 7)
        error = torch.addcmul(zero - grouped, codes, scale).square_().sum(-1, keepdim=True)
        tried = [error, codes, scale, zero]
        if clip == CLIPS[0]:
            best = tried
        else:
            better = error < best[0]
            best = [torch.where(better, new, old) for new, old in zip(tried, best, strict=True)]
    _, codes, scale, zero = best
    return (codes + 8).to(torch.uint8).view_as(weight), scale[..., 0].to(dtype), zero[..., 0].to(dtype)
