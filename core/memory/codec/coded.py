"""Weights that a checkpoint already stores as codes: taken over without rounding them again."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Coded(NamedTuple):
    """One matrix in the checkpoint's own quantization, unpacked and oriented [out, in] (or as the model stores it).

    weight = (code - 2 ** (bits - 1)) * scale + zero, or table[code] * scale; `format` names a format of
    `core.memory.codec` with the same bits, group and table. Leading dimensions are allowed and kept.
    """

    format: str
    codes: torch.Tensor           # [..., out, in] uint8; int8 for the int8 formats, which are symmetric: code * scale
    scale: torch.Tensor           # [..., out, in / group] fp16, bf16 or fp32; uint8 exponents (2 ** (e - 127)) for mxfp4
    zero: torch.Tensor | None     # [..., out, in / group] fp16, bf16 or fp32; None = symmetric or table
