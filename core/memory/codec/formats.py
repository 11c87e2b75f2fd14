"""The number types in a blob; re-exports the registry of formats, `core.settings.formats`."""

from dataclasses import dataclass

import torch

from core.settings.formats import FORMATS, Format, format_of

__all__ = ["FORMATS", "Format", "Numbers", "format_of", "numbers_of"]


SCALES = {"e8m0": torch.uint8, "e4m3": torch.float8_e4m3fn, "int8": torch.int8}
"""Number types of scales that a format prescribes; uint8: exponents, 2 ** (e - 127). Zeros beside int8 are int8."""


@dataclass(frozen=True, slots=True)
class Numbers:
    """Number types in a blob: of plain weights and biases, scales and zeros. Independent of the compute dtype."""

    weight: torch.dtype
    scale: torch.dtype
    zero: torch.dtype


def numbers_of(format: Format, dtype: torch.dtype, stored: Numbers | None) -> Numbers:
    """`stored`, or `dtype` for all of them; a format with a fixed number type keeps it."""
    numbers = stored or Numbers(dtype, dtype, dtype)
    if format.bits == 16:
        return Numbers(getattr(torch, format.name), numbers.scale, numbers.zero)
    scale = SCALES.get(format.scale, numbers.scale)
    return Numbers(numbers.weight, scale, scale if format.wide else numbers.zero)
