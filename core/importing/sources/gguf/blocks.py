"""Unpacks ggml's blocks to codes, where one of our formats holds the same codes. Layouts: ggml-common.h, ggml-quants.c.

Exact, bit for bit as gguf dequantises them: Q8_0 and Q5_0 (int8-g32), Q4_0 (int4-g32-sym), IQ4_NL, MXFP4, NVFP4, TQ1_0
and TQ2_0, and in formats of their own, with integer scales beside a float16 number of 256 weights, the k-quants and the
other i-quants.
Codes kept, scales rounded once when a blob stores them as float16: Q4_1 (int4-g32), and Q4_K and IQ4_XS where other
experts' inputs are not whole blocks of 256, in int4-g32 and iq4_nl. There each weight is off by at most 2 ** -11 *
(8 |scale| + |zero|), or 2 ** -11 |weight| for IQ4_XS, and where float16 is subnormal by 2 ** -25 for the zero and for
each step of the code: under a hundredth of the error of the 4 bits themselves.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from core.importing.sources.gguf import grids
from core.importing.sources.gguf.block_parts import Blocks, bits, half, halves, nibbles
from core.memory.codec.coded import QuantizedTensor

GROUP = 32
NOT_A_NUMBER = 255  # as an E8M0 exponent
NO_SCALE = 255  # of NVFP4: ggml reads 480, which e4m3 has not


def decode(type: str, raw: torch.Tensor) -> QuantizedTensor | None:
    """Codes of rows of blocks, uint8 [..., bytes of a row] -> [..., weights of a row].

    None where no format holds this type, where these scales are not finite as float16, or where blocks mean nothing.
    """
    kind = TYPES.get(type)
    if kind is None:
        return None
    leading = raw.shape[:-1]
    codes, scale, zero, row, usable = kind.read(raw.reshape(-1, kind.bytes))
    if row is not None:
        usable = usable and bool(row.isfinite().all())
    elif scale.is_floating_point() and scale.dtype != torch.float8_e4m3fn:
        finite = bool(scale.half().isfinite().all()) and (zero is None or bool(zero.half().isfinite().all()))
        usable = usable and finite
    if not usable:
        return None
    if scale.dtype == torch.float8_e4m3fn:
        row = torch.ones(*leading, 1)
    held = QuantizedTensor(kind.format, codes, scale, zero, row)
    return held.each(lambda numbers: numbers.reshape(*leading, -1))


def _q8_0(blocks: torch.Tensor) -> Blocks:
    return Blocks(blocks[:, 2:].clone().view(torch.int8), half(blocks, 0))


def _q5_0(blocks: torch.Tensor) -> Blocks:
    high = (blocks[:, 2:6, None] >> torch.arange(8, dtype=torch.uint8) & 1).view(-1, GROUP)
    return Blocks((nibbles(blocks[:, 6:]) | high << 4).to(torch.int8) - 16, half(blocks, 0))


def _q4_0(blocks: torch.Tensor) -> Blocks:
    return Blocks(nibbles(blocks[:, 2:]), half(blocks, 0))


def _q4_1(blocks: torch.Tensor) -> Blocks:
    scale = half(blocks, 0)
    return Blocks(nibbles(blocks[:, 4:]), scale, scale.float() * 8 + half(blocks, 2).float())


def _mxfp4(blocks: torch.Tensor) -> Blocks:
    scale = blocks[:, :1].clone()  # ggml doubles its table and halves its scale
    return Blocks(nibbles(blocks[:, 1:]), scale, usable=bool((scale != NOT_A_NUMBER).all()))


def _nvfp4(blocks: torch.Tensor) -> Blocks:
    """Four groups of 16. Scales have no sign, and 127 is 0."""
    scale = blocks[:, :4] & 0x7F
    scale = torch.where(scale == 0x7F, 0, scale).view(torch.float8_e4m3fn)
    return Blocks(nibbles(blocks[:, 4:].view(-1, 4, 8)), scale, usable=bool((blocks[:, :4] != NO_SCALE).all()))


def _minimum(codes: torch.Tensor, scales: torch.Tensor, minimums: torch.Tensor, numbers: torch.Tensor) -> Blocks:
    """Of blocks with minimums, which are subtracted, and the numbers that scales and minimums are multiplied by."""
    return Blocks(codes, scales.to(torch.int8), -minimums.to(torch.int8), numbers)


def _q2_k(blocks: torch.Tensor) -> Blocks:
    """A 4-bit scale and minimum for each of 16 groups, side by side; codes of four groups of 32 beside each other."""
    return _minimum(
        bits(blocks[:, 16:80].view(-1, 2, 32), 2), blocks[:, :16] & 15, blocks[:, :16] >> 4, halves(blocks, 80)
    )


def _q3_k(blocks: torch.Tensor) -> Blocks:
    """A 6-bit scale for each of 16 groups: the low halves in 8 bytes, the two high bits of each four in 4."""
    low, high = bits(blocks[:, 32:96].view(-1, 2, 32), 2).flatten(1), bits(blocks[:, :32], 1).flatten(1)
    scales = nibbles(blocks[:, 96:104]) | bits(blocks[:, 104:108], 2).flatten(1) << 4
    return Blocks(low | high << 2, scales.to(torch.int8) - 32, None, half(blocks, 108))


def _six_bits(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A 6-bit scale and minimum for each of 8 groups, in 12 bytes: four low scales, four low minimums, then the low
    halves of the other four, whose top two bits are stored above the former ones'."""
    low, least, mixed = packed.view(-1, 3, 4).unbind(1)
    scales = torch.cat((low & 63, mixed & 15 | low >> 6 << 4), dim=1)
    return scales, torch.cat((least & 63, mixed >> 4 | least >> 6 << 4), dim=1)


def _q4_k(blocks: torch.Tensor) -> Blocks:
    codes = nibbles(blocks[:, 16:].view(-1, 4, GROUP))
    return _minimum(codes, *_six_bits(blocks[:, 4:16]), halves(blocks, 0))


def _q5_k(blocks: torch.Tensor) -> Blocks:
    codes = nibbles(blocks[:, 48:].view(-1, 4, GROUP)) | bits(blocks[:, 16:48], 1).reshape(-1, 4, 2 * GROUP) << 4
    return _minimum(codes, *_six_bits(blocks[:, 4:16]), halves(blocks, 0))


def _q6_k(blocks: torch.Tensor) -> Blocks:
    """Two halves of 128 codes: four low bits of each two in 64 bytes, two high bits of each four in 32."""
    low, high = nibbles(blocks[:, :128].view(-1, 2, 64)), bits(blocks[:, 128:192].view(-1, 2, 32), 2)
    scales = blocks[:, 192:208].clone().view(torch.int8)
    return Blocks(low | high.flatten(2) << 4, scales, None, half(blocks, 208))


def _iq4_xs(blocks: torch.Tensor) -> Blocks:
    """A 6-bit scale for each of 8 groups: two bits of each in the first two bytes, the low halves in the next 4."""
    high = (blocks[:, 2:4, None] >> torch.tensor((0, 2, 4, 6), dtype=torch.uint8) & 3).view(-1, 8)
    low = torch.stack((blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4), dim=-1).view(-1, 8)
    scales = (low | high << 4).to(torch.int8) - 32
    return Blocks(nibbles(blocks[:, 8:].view(-1, 8, GROUP // 2)), scales, None, half(blocks, 0))


def _ternary(numbers: torch.Tensor, scale: torch.Tensor) -> Blocks:
    """Of 0, 1 and 2 for -1, 0 and 1: as codes, 2 stands for 0."""
    return Blocks(numbers + 1, scale, usable=bool((numbers < 3).all()))


def _tq1_0(blocks: torch.Tensor) -> Blocks:
    """Five digits to the base of 3 in a byte, as a fraction of 256; four in the last ones."""

    def digits(at: slice, count: int) -> torch.Tensor:
        powers = 3 ** torch.arange(count, dtype=torch.uint8)[:, None]
        return ((blocks[:, None, at] * powers).int() * 3 >> 8).to(torch.uint8).flatten(1)

    numbers = digits(slice(32), 5), digits(slice(32, 48), 5), digits(slice(48, 52), 4)
    return _ternary(torch.cat(numbers, 1), half(blocks, 52))


def _tq2_0(blocks: torch.Tensor) -> Blocks:
    return _ternary(bits(blocks[:, :64].view(-1, 2, 32), 2), half(blocks, 64))


class Type(NamedTuple):
    """The format that holds a type's codes, the bytes of a block, and what reads blocks [n, bytes]."""

    format: str
    bytes: int
    read: Callable[[torch.Tensor], Blocks]


TYPES = {
    "Q8_0": Type("int8-g32", 34, _q8_0),
    "Q5_0": Type("int8-g32", 22, _q5_0),
    "Q4_0": Type("int4-g32-sym", 18, _q4_0),
    "Q4_1": Type("int4-g32", 20, _q4_1),
    "Q2_K": Type("q2_k", 84, _q2_k),
    "Q3_K": Type("q3_k", 110, _q3_k),
    "Q4_K": Type("q4_k", 144, _q4_k),
    "Q5_K": Type("q5_k", 176, _q5_k),
    "Q6_K": Type("q6_k", 210, _q6_k),
    "IQ4_NL": Type("iq4_nl", 18, _q4_0),
    "IQ4_XS": Type("iq4_xs", 136, _iq4_xs),
    "IQ3_S": Type("iq3_s", 110, grids.iq3_s),
    "IQ3_XXS": Type("iq3_xxs", 98, grids.iq3_xxs),
    "IQ2_S": Type("iq2_s", 82, grids.iq2_s),
    "IQ2_XS": Type("iq2_s", 74, grids.iq2_xs),
    "IQ2_XXS": Type("iq2_xxs", 66, grids.iq2_xxs),
    "IQ1_M": Type("iq1_m", 56, grids.iq1_m),
    "IQ1_S": Type("iq1_s", 50, grids.iq1_s),
    "TQ2_0": Type("tq2_0", 66, _tq2_0),
    "TQ1_0": Type("tq2_0", 54, _tq1_0),
    "MXFP4": Type("mxfp4", 17, _mxfp4),
    "NVFP4": Type("nvfp4", 36, _nvfp4),
}
HELD = {name: type.format for name, type in TYPES.items()}
"""The format that holds a type's codes."""
EXACT = frozenset(HELD) - {"Q4_1"}
"""Types whose scales are held exactly too."""
