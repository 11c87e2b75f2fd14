"""Weights that a checkpoint already stores as codes: used without rounding them again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from core.memory.codec.formats import Format, format_of
from core.memory.codec.tables import table


class QuantizedTensor(NamedTuple):
    """One matrix in the checkpoint's own quantization, unpacked and oriented [out, in] (or as the model stores it).

    weight = (code - offset) * scale + zero, or table[code] * scale, or table[code] * (scale * row); `format` names a
    format of `core.memory.codec` with the same bits, group and table. Leading dimensions are allowed and kept.
    """

    format: str
    codes: torch.Tensor  # [..., out, in] uint8; int8 for the int8 formats, which are symmetric: code * scale
    scale: torch.Tensor  # [..., out, in / group] fp16, bf16 or fp32; uint8: exponents, 2 ** (e - 127); int8
    zero: torch.Tensor | None  # [..., out, in / group] fp16, bf16, fp32 or int8; None = symmetric or table
    row: torch.Tensor | None = None
    """[..., out, 1] fp32, where rows have a scale of their own. [..., out, in / wide] fp16 where scales are int8: what
    they are multiplied by, or, where there are zeros, [..., out, 2 in / wide]: each followed by what these are."""

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

    def held_in(self, name: str) -> QuantizedTensor | None:
        """These codes, oriented [..., out, in], in another format: one with more bits that is otherwise alike, or one
        whose scales and zeros are plain numbers; None where it has no such codes, or numbers too large for fp16."""
        own, other = format_of(self.format), format_of(name)
        if own == other:
            return self
        if other.holds(own):
            return self._replace(format=name, codes=self.codes + (other.offset - own.offset))
        alike = (own.bits, own.group, own.table, own.zero) == (other.bits, other.group, other.table, other.zero)
        if self.row is None or not (own.wide and alike) or other.scale:
            return None
        scale, zero = expanded(own, self.scale.float(), self.zero, self.row)
        zero = None if zero is None else zero + (other.offset - own.offset) * scale
        if not all(bool(one.half().isfinite().all()) for one in (scale, zero) if one is not None):
            return None
        return QuantizedTensor(name, self.codes, scale, zero)

    def dequantized(self) -> torch.Tensor:
        """The weights of codes that are oriented [..., out, in], in fp32."""
        return dequantize(format_of(self.format), self.codes, self.scale, self.zero, self.row)


def alike(codes: Sequence[QuantizedTensor]) -> list[QuantizedTensor]:
    """The same codes in that of their formats which holds those of all others; none where there is no such one."""
    formats = {one.format: format_of(one.format) for one in codes}
    for name, format in formats.items():
        if all(map(format.holds, formats.values())):
            return [found for one in codes if (found := one.held_in(name)) is not None]
    return []


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
        entries -= format.offset
    step = scales(scale)
    if format.wide:
        assert row is not None
        step, zero = expanded(format, step, zero, row)
    elif row is not None:
        step = step * row
    step = step[..., None] if format.group else step.view(*codes.shape[:-1], 1, 1)
    grouped = entries.view(*codes.shape[:-1], -1, format.group or codes.shape[-1])
    if zero is None:
        return grouped.mul_(step).view(codes.shape)
    return torch.addcmul(zero.float()[..., None], grouped, step).view(codes.shape)


def expanded(
    format: Format, scale: torch.Tensor, zero: torch.Tensor | None, row: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Integers [..., out, in / group] as scales and zeros of a `wide` format, in fp32: exact."""
    each = row.float().unflatten(-1, (-1, 1 if zero is None else 2)).repeat_interleave(format.wide // format.group, -2)
    return scale * each[..., 0], None if zero is None else zero * each[..., 1]
