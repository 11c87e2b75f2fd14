"""Weights that a checkpoint already stores as codes: used without rounding them again."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from core.memory.codec.formats import Format, format_of
from core.memory.codec.tables import table


class QuantizedTensor(NamedTuple):
    """One matrix in the checkpoint's own quantization, unpacked and oriented [out, in] (or as the model stores it).

    weight = (code - 2 ** (bits - 1)) * scale + zero, or table[code] * scale, or table[code] * (scale * row); `format`
    names a format of `core.memory.codec` with the same bits, group and table. Leading dimensions are allowed and kept.
    """

    format: str
    codes: torch.Tensor  # [..., out, in] uint8; int8 for the int8 formats, which are symmetric: code * scale
    scale: torch.Tensor  # [..., out, in / group] fp16, bf16 or fp32; uint8: exponents, 2 ** (e - 127)
    zero: torch.Tensor | None  # [..., out, in / group] fp16, bf16 or fp32; None = symmetric or table
    row: torch.Tensor | None = None  # [..., out, 1] fp32, where rows have a scale of their own

    def to(self, device: torch.device) -> QuantizedTensor:
        """The same on another device."""
        return self.each(lambda numbers: numbers.to(device))

    def each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> QuantizedTensor:
        """The same with another arrangement of its tensors."""
        zero, row = (t if t is None else change(t) for t in (self.zero, self.row))
        return QuantizedTensor(self.format, change(self.codes), change(self.scale), zero, row)

    def part(self, at: slice) -> QuantizedTensor:
        """A slice of the rows of codes that are oriented [out, in]."""
        return self.each(lambda numbers: numbers[at])

    def turned(self) -> QuantizedTensor:
        """Transposed: from [in, out] with scales [in / group, out] to [out, in] with [out, in / group], or back."""
        return self.each(lambda t: t if t.dim() < self.codes.dim() else t.transpose(-1, -2))

    def dequantized(self) -> torch.Tensor:
        """The weights of codes that are oriented [..., out, in], in fp32."""
        return dequantize(format_of(self.format), self.codes, self.scale, self.zero, self.row)


def scales(scale: torch.Tensor) -> torch.Tensor:
    """Scales in fp32; uint8 scales are exponents, 2 ** (e - 127), 255 is NaN (OCP Microscaling, section 5.4.1)."""
    return scale.view(torch.float8_e8m0fnu).float() if scale.dtype == torch.uint8 else scale.float()


def dequantize(
    format: Format, codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None, row: torch.Tensor | None = None
) -> torch.Tensor:
    """Codes [..., out, in], scale and zero [..., out, in / group] (row formats: [..., out]), row [..., out, 1] ->
    [..., out, in] fp32."""
    if format.table:
        entries = table(format.table, codes.device).index_select(0, codes.flatten().int())
    else:
        entries = codes.to(torch.float32, memory_format=torch.contiguous_format)
        if codes.dtype == torch.uint8:
            entries -= 1 << format.bits - 1
    step = scales(scale) if row is None else scales(scale) * row
    step = step[..., None] if format.group else step.view(*codes.shape[:-1], 1, 1)
    grouped = entries.view(*codes.shape[:-1], -1, format.group or codes.shape[-1])
    if zero is None:
        return grouped.mul_(step).view(codes.shape)
    return torch.addcmul(zero.float()[..., None], grouped, step).view(codes.shape)
