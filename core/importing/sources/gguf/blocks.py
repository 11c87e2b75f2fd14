"""Unpacks ggml's blocks to codes, where one of our formats holds the same codes. Layouts: ggml-common.h, ggml-quants.c.

Exact, bit for bit as gguf dequantises them: Q8_0 and Q5_0 (int8-g32), Q4_0 (int4-g32-sym), IQ4_NL (iq4_nl), MXFP4 and
NVFP4.
Codes kept, scales rounded once when a blob stores them as float16: Q4_1 and Q4_K (int4-g32), IQ4_XS (iq4_nl). There
each weight is off by at most 2 ** -11 * (8 |scale| + |zero|), or 2 ** -11 |weight| for IQ4_XS, and where float16 is
subnormal by 2 ** -25 for the zero and for each step of the code: under a hundredth of the error of the 4 bits
themselves. float32 would remove nearly all of it, for one more bit per weight (Q4_K: 6 instead of 5).
"""

from collections.abc import Callable

import torch

from core.memory.codec.coded import QuantizedTensor

HELD = {
    "Q8_0": "int8-g32",
    "Q5_0": "int8-g32",
    "Q4_0": "int4-g32-sym",
    "Q4_1": "int4-g32",
    "Q4_K": "int4-g32",
    "IQ4_NL": "iq4_nl",
    "IQ4_XS": "iq4_nl",
    "MXFP4": "mxfp4",
    "NVFP4": "nvfp4",
}
"""The format that holds a type's codes."""
EXACT = frozenset({"Q8_0", "Q5_0", "Q4_0", "IQ4_NL", "MXFP4", "NVFP4"})
"""Types whose scales are held exactly too."""
GROUP = 32
NOT_A_NUMBER = 255  # as an E8M0 exponent
NO_SCALE = 255  # of NVFP4: ggml reads 480, which e4m3 has not


def decode(type: str, raw: torch.Tensor) -> QuantizedTensor | None:
    """Codes of rows of blocks, uint8 [..., bytes of a row] -> [..., weights of a row].

    None where no format holds this type, or where these scales are not finite as float16.
    """
    reader = _READERS.get(type)
    if reader is None:
        return None
    leading, blocks = raw.shape[:-1], raw.reshape(-1, _BLOCK_BYTES[type])
    codes, scale, zero = reader(blocks)
    if scale.dtype == torch.float8_e4m3fn:
        usable = bool((blocks[:, :4] != NO_SCALE).all())
    elif scale.dtype == torch.uint8:
        usable = bool((scale != NOT_A_NUMBER).all())
    else:
        usable = bool(scale.half().isfinite().all()) and (zero is None or bool(zero.half().isfinite().all()))
    if not usable:
        return None
    zero = None if zero is None else zero.reshape(*leading, -1)
    row = torch.ones(*leading, 1) if scale.dtype == torch.float8_e4m3fn else None
    return QuantizedTensor(HELD[type], codes.reshape(*leading, -1), scale.reshape(*leading, -1), zero, row)


Blocks = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""Codes, scale and zero of blocks, in order."""


def _half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    return blocks[:, at : at + 2].clone().view(torch.float16)


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """[..., n] bytes -> [..., 2 n]: all low halves, then all high ones."""
    return torch.cat((packed & 15, packed >> 4), dim=-1)


def _q8_0(blocks: torch.Tensor) -> Blocks:
    return blocks[:, 2:].clone().view(torch.int8), _half(blocks, 0), None


def _q5_0(blocks: torch.Tensor) -> Blocks:
    high = (blocks[:, 2:6, None] >> torch.arange(8, dtype=torch.uint8) & 1).view(-1, GROUP)
    return (_nibbles(blocks[:, 6:]) | high << 4).to(torch.int8) - 16, _half(blocks, 0), None


def _q4_0(blocks: torch.Tensor) -> Blocks:
    return _nibbles(blocks[:, 2:]), _half(blocks, 0), None


def _q4_1(blocks: torch.Tensor) -> Blocks:
    scale = _half(blocks, 0)
    return _nibbles(blocks[:, 4:]), scale, scale.float() * 8 + _half(blocks, 2).float()


def _mxfp4(blocks: torch.Tensor) -> Blocks:
    return _nibbles(blocks[:, 1:]), blocks[:, :1].clone(), None  # ggml doubles its table and halves its scale


def _nvfp4(blocks: torch.Tensor) -> Blocks:
    """Four groups of 16. Scales have no sign, and 127 is 0."""
    scale = blocks[:, :4] & 0x7F
    scale = torch.where(scale == 0x7F, 0, scale)
    return _nibbles(blocks[:, 4:].view(-1, 4, 8)), scale.view(torch.float8_e4m3fn), None


def _q4_k(blocks: torch.Tensor) -> Blocks:
    """A 6-bit scale and minimum for each of 8 groups, in 12 bytes: four low scales, four low minimums, then the low
    halves of the other four, whose top two bits are stored above the former ones'."""
    low, least, mixed = blocks[:, 4:16].view(-1, 3, 4).unbind(1)
    scales = torch.cat((low & 63, mixed & 15 | low >> 6 << 4), dim=1).float() * _half(blocks, 0).float()
    minimums = torch.cat((least & 63, mixed >> 4 | least >> 6 << 4), dim=1).float() * _half(blocks, 2).float()
    return _nibbles(blocks[:, 16:].view(-1, 4, GROUP)), scales, scales * 8 - minimums


def _iq4_xs(blocks: torch.Tensor) -> Blocks:
    """A 6-bit scale for each of 8 groups: two bits of each in the first two bytes, the low halves in the next 4."""
    high = (blocks[:, 2:4, None] >> torch.tensor((0, 2, 4, 6), dtype=torch.uint8) & 3).view(-1, 8)
    low = torch.stack((blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4), dim=-1).view(-1, 8)
    scales = ((low | high << 4).to(torch.int8) - 32).float() * _half(blocks, 0).float()
    return _nibbles(blocks[:, 8:].view(-1, 8, GROUP // 2)), scales, None


_READERS: dict[str, Callable[[torch.Tensor], Blocks]] = {
    "Q8_0": _q8_0,
    "Q5_0": _q5_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q4_K": _q4_k,
    "IQ4_NL": _q4_0,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
    "NVFP4": _nvfp4,
}
_BLOCK_BYTES = {
    "Q8_0": 34,
    "Q5_0": 22,
    "Q4_0": 18,
    "Q4_1": 20,
    "Q4_K": 144,
    "IQ4_NL": 18,
    "IQ4_XS": 136,
    "MXFP4": 17,
    "NVFP4": 36,
}
