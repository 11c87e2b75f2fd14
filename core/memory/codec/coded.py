"""Weights that a checkpoint already stores as codes: used without rounding them again."""

from __future__ import annotations

from typing import NamedTuple

import torch

from core.memory.codec.formats import Format, format_of
from core.memory.codec.tables import table


class QuantizedTensor(NamedTuple):
    """One matrix in the checkpoint's own quantization, unpacked and oriented [out, in] (or as the model stores it).

    weight = (code - 2 ** (bits - 1)) * scale + zero, or table[code] * scale; `format` names a format of
    `core.memory.codec` with the same bits, group and table. Leading dimensions are allowed and kept.
    """

    format: str
    codes: torch.Tensor  # [..., out, in] uint8; int8 for the int8 formats, which are symmetric: code * scale
    scale: torch.Tensor  # [..., out, in / group] fp16, bf16 or fp32; mxfp4: uint8 exponents, 2 ** (e - 127)
    zero: torch.Tensor | None  # [..., out, in / group] fp16, bf16 or fp32; None = symmetric or table

    def to(self, device: torch.device) -> QuantizedTensor:
        """The same on another device."""
        zero = self.zero if self.zero is None else self.zero.to(device)
        return QuantizedTensor(self.format, self.codes.to(device), self.scale.to(device), zero)

    def part(self, at: slice) -> QuantizedTensor:
        """A slice of the rows of codes that are oriented [out, in]."""
        return QuantizedTensor(
            self.format, self.codes[at], self.scale[at], None if self.zero is None else self.zero[at]
        )

    def turned(self) -> QuantizedTensor:
        """Transposed: from [in, out] with scales [in / group, out] to [out, in] with [out, in / group], or back."""
        scale, zero = (
            t if t is None or t.dim() < self.codes.dim() else t.transpose(-1, -2) for t in (self.scale, self.zero)
        )
        assert scale is not None
        return QuantizedTensor(self.format, self.codes.transpose(-1, -2), scale, zero)

    def dequantized(self) -> torch.Tensor:
        """The weights of codes that are oriented [..., out, in], in fp32."""
        return dequantize(format_of(self.format), self.codes, self.scale, self.zero)


def scales(scale: torch.Tensor) -> torch.Tensor:
    """Scales in fp32; uint8 scales are exponents, 2 ** (e - 127), 255 is NaN (OCP Microscaling, section 5.4.1)."""
    return scale.view(torch.float8_e8m0fnu).float() if scale.dtype == torch.uint8 else scale.float()


def dequantize(format: Format, codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None) -> torch.Tensor:
    """Codes [..., out, in], scale and zero [..., out, in / group] (row formats: [..., out]) -> [..., out, in] fp32."""
    if format.table:
        entries = table(format.table, codes.device).index_select(0, codes.flatten().int())
    else:
        entries = codes.to(torch.float32, memory_format=torch.contiguous_format)
        if codes.dtype == torch.uint8:
            entries -= 1 << format.bits - 1
    step = scales(scale)
    step = step[..., None] if format.group else step.view(*codes.shape[:-1], 1, 1)
    grouped = entries.view(*codes.shape[:-1], -1, format.group or codes.shape[-1])
    if zero is None:
        return grouped.mul_(step).view(codes.shape)
    return torch.addcmul(zero.float()[..., None], grouped, step).view(codes.shape)
