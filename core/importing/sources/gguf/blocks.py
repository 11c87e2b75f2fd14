"""Unpacks ggml's blocks to codes, where one of our formats holds the same codes. Layouts: ggml-common.h, ggml-quants.c.

Exact, bit for bit as gguf dequantises them: Q8_0 and Q5_0 (int8-g32), Q4_0 (int4-g32-sym), IQ4_NL, MXFP4, NVFP4, and
in formats of their own, with integer scales beside a float16 number of 256 weights, Q2_K, Q4_K, Q5_K, Q6_K and IQ4_XS.
Codes kept, scales rounded once when a blob stores them as float16: Q4_1 (int4-g32), and Q4_K and IQ4_XS where other
experts' inputs are not whole blocks of 256, in int4-g32 and iq4_nl. There each weight is off by at most 2 ** -11 *
(8 |scale| + |zero|), or 2 ** -11 |weight| for IQ4_XS, and where float16 is subnormal by 2 ** -25 for the zero and for
each step of the code: under a hundredth of the error of the 4 bits themselves.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from core.memory.codec.coded import QuantizedTensor

HELD = {
    "Q8_0": "int8-g32",
    "Q5_0": "int8-g32",
    "Q4_0": "int4-g32-sym",
    "Q4_1": "int4-g32",
    "Q2_K": "q2_k",
    "Q4_K": "q4_k",
    "Q5_K": "q5_k",
    "Q6_K": "q6_k",
    "IQ4_NL": "iq4_nl",
    "IQ4_XS": "iq4_xs",
    "MXFP4": "mxfp4",
    "NVFP4": "nvfp4",
}
"""The format that holds a type's codes."""
EXACT = frozenset(HELD) - {"Q4_1"}
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
    codes, scale, zero, row = reader(blocks)
    if scale.dtype == torch.float8_e4m3fn:
        usable = bool((blocks[:, :4] != NO_SCALE).all())
    elif scale.dtype == torch.uint8:
        usable = bool((scale != NOT_A_NUMBER).all())
    elif row is not None:
        usable = bool(row.isfinite().all())
    else:
        usable = bool(scale.half().isfinite().all()) and (zero is None or bool(zero.half().isfinite().all()))
    if not usable:
        return None
    if scale.dtype == torch.float8_e4m3fn:
        row = torch.ones(*leading, 1)
    held = QuantizedTensor(HELD[type], codes, scale, zero, row)
    return held.each(lambda numbers: numbers.reshape(*leading, -1))


class Blocks(NamedTuple):
    """What blocks hold, in order: as `QuantizedTensor` has it."""

    codes: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None = None
    row: torch.Tensor | None = None


def _half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    return blocks[:, at : at + 2].clone().view(torch.float16)


def _halves(blocks: torch.Tensor, at: int) -> torch.Tensor:
    return blocks[:, at : at + 4].clone().view(torch.float16)


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """[..., n] bytes -> [..., 2 n]: all low halves, then all high ones."""
    return torch.cat((packed & 15, packed >> 4), dim=-1)


def _q8_0(blocks: torch.Tensor) -> Blocks:
    return Blocks(blocks[:, 2:].clone().view(torch.int8), _half(blocks, 0))


def _q5_0(blocks: torch.Tensor) -> Blocks:
    high = (blocks[:, 2:6, None] >> torch.arange(8, dtype=torch.uint8) & 1).view(-1, GROUP)
    return Blocks((_nibbles(blocks[:, 6:]) | high << 4).to(torch.int8) - 16, _half(blocks, 0))


def _q4_0(blocks: torch.Tensor) -> Blocks:
    return Blocks(_nibbles(blocks[:, 2:]), _half(blocks, 0))


def _q4_1(blocks: torch.Tensor) -> Blocks:
    scale = _half(blocks, 0)
    return Blocks(_nibbles(blocks[:, 4:]), scale, scale.float() * 8 + _half(blocks, 2).float())


def _mxfp4(blocks: torch.Tensor) -> Blocks:
    return Blocks(_nibbles(blocks[:, 1:]), blocks[:, :1].clone())  # ggml doubles its table and halves its scale


def _nvfp4(blocks: torch.Tensor) -> Blocks:
    """Four groups of 16. Scales have no sign, and 127 is 0."""
    scale = blocks[:, :4] & 0x7F
    scale = torch.where(scale == 0x7F, 0, scale)
    return Blocks(_nibbles(blocks[:, 4:].view(-1, 4, 8)), scale.view(torch.float8_e4m3fn))


def _bits(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """[..., n] bytes -> [..., 8 / bits, n]: all lowest bits, then all above them."""
    return packed[..., None, :] >> torch.arange(0, 8, bits, dtype=torch.uint8)[:, None] & (1 << bits) - 1


def _minimum(codes: torch.Tensor, scales: torch.Tensor, minimums: torch.Tensor, numbers: torch.Tensor) -> Blocks:
    """Of blocks with minimums, which are subtracted, and the numbers that scales and minimums are multiplied by."""
    return Blocks(codes, scales.to(torch.int8), -minimums.to(torch.int8), numbers)


def _q2_k(blocks: torch.Tensor) -> Blocks:
    """A 4-bit scale and minimum for each of 16 groups, side by side; codes of four groups of 32 beside each other."""
    return _minimum(
        _bits(blocks[:, 16:80].view(-1, 2, 32), 2), blocks[:, :16] & 15, blocks[:, :16] >> 4, _halves(blocks, 80)
    )


def _six_bits(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A 6-bit scale and minimum for each of 8 groups, in 12 bytes: four low scales, four low minimums, then the low
    halves of the other four, whose top two bits are stored above the former ones'."""
    low, least, mixed = packed.view(-1, 3, 4).unbind(1)
    scales = torch.cat((low & 63, mixed & 15 | low >> 6 << 4), dim=1)
    return scales, torch.cat((least & 63, mixed >> 4 | least >> 6 << 4), dim=1)


def _q4_k(blocks: torch.Tensor) -> Blocks:
    codes = _nibbles(blocks[:, 16:].view(-1, 4, GROUP))
    return _minimum(codes, *_six_bits(blocks[:, 4:16]), _halves(blocks, 0))


def _q5_k(blocks: torch.Tensor) -> Blocks:
    codes = _nibbles(blocks[:, 48:].view(-1, 4, GROUP)) | _bits(blocks[:, 16:48], 1).reshape(-1, 4, 2 * GROUP) << 4
    return _minimum(codes, *_six_bits(blocks[:, 4:16]), _halves(blocks, 0))


def _q6_k(blocks: torch.Tensor) -> Blocks:
    """Two halves of 128 codes: four low bits of each two in 64 bytes, two high bits of each four in 32."""
    low, high = _nibbles(blocks[:, :128].view(-1, 2, 64)), _bits(blocks[:, 128:192].view(-1, 2, 32), 2)
    scales = blocks[:, 192:208].clone().view(torch.int8)
    return Blocks(low | high.flatten(2) << 4, scales, None, _half(blocks, 208))


def _iq4_xs(blocks: torch.Tensor) -> Blocks:
    """A 6-bit scale for each of 8 groups: two bits of each in the first two bytes, the low halves in the next 4."""
    high = (blocks[:, 2:4, None] >> torch.tensor((0, 2, 4, 6), dtype=torch.uint8) & 3).view(-1, 8)
    low = torch.stack((blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4), dim=-1).view(-1, 8)
    scales = (low | high << 4).to(torch.int8) - 32
    return Blocks(_nibbles(blocks[:, 8:].view(-1, 8, GROUP // 2)), scales, None, _half(blocks, 0))


_READERS: dict[str, Callable[[torch.Tensor], Blocks]] = {
    "Q8_0": _q8_0,
    "Q5_0": _q5_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q2_K": _q2_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
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
    "Q2_K": 84,
    "Q4_K": 144,
    "Q5_K": 176,
    "Q6_K": 210,
    "IQ4_NL": 18,
    "IQ4_XS": 136,
    "MXFP4": 17,
    "NVFP4": 36,
}
