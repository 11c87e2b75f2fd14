"""Unpacks the blocks of ggml's i-quants whose codes are numbers of a grid: 8 or 4 weights each.

A file says which point of the grid, and the signs of its magnitudes. Held is a code for each weight (see
`core.memory.codec.tables`), which takes more bytes, and which kernels read as those of any other format. The points are
those of the package `gguf`. Layouts: ggml-common.h, ggml-quants.c.
"""

import functools

import torch

from core.importing.sources.gguf.block_parts import Blocks, beside, half, words
from core.system.gguf import gguf_package


@functools.cache
def _grid(type: str) -> torch.Tensor:
    """The points of a grid: which of its values, in ascending order, each has. uint8 [points, 8 or 4]."""
    kind = getattr(gguf_package().quants, type)
    kind.init_grid()
    points = torch.from_numpy(kind.grid).reshape(kind.grid_shape)
    with torch.inference_mode(False):
        return torch.searchsorted(torch.tensor(kind.grid_map, dtype=points.dtype), points).to(torch.uint8)


def _points(type: str, numbers: torch.Tensor) -> torch.Tensor:
    """[n, ...] -> [n, 256]."""
    return _grid(type)[numbers.long()].view(len(numbers), -1)


def _signs(numbers: torch.Tensor) -> torch.Tensor:
    """Seven signs each, and an eighth that makes the number of negative ones even: [n, ...] -> [n, 256], 1 for a
    negative."""
    numbers = (numbers & 127).to(torch.uint8)
    odd = numbers ^ numbers >> 4
    odd ^= odd >> 2
    return beside((numbers | (odd ^ odd >> 1) << 7).flatten(1), 1)


def _seven(numbers: torch.Tensor) -> torch.Tensor:
    """Four numbers of signs in the low 28 bits of each: [n, 8] -> [n, 8, 4]."""
    return numbers[..., None] >> torch.arange(0, 28, 7)


def _odd(scale: torch.Tensor) -> torch.Tensor:
    """Scales are all odd: what is stored, and a half."""
    return 2 * scale.to(torch.int8) + 1


def iq3_xxs(blocks: torch.Tensor) -> Blocks:
    """Numbers of points; for each of 8 groups, four of signs and a 4-bit scale above them."""
    mixed = words(blocks, 66, 8, torch.int32)
    codes = _points("IQ3_XXS", blocks[:, 2:66]) | _signs(_seven(mixed)) << 3
    return Blocks(codes, _odd(mixed >> 28 & 15), None, half(blocks, 0))


def iq3_s(blocks: torch.Tensor) -> Blocks:
    """Low bytes of numbers, their ninth bits, signs, and 4-bit scales for 8 groups."""
    numbers = blocks[:, 2:66].int() | beside(blocks[:, 66:74], 1).int() << 8
    codes = _points("IQ3_S", numbers) | beside(blocks[:, 74:106], 1) << 3
    return Blocks(codes, _odd(beside(blocks[:, 106:110], 4)), None, half(blocks, 0))


def iq2_xxs(blocks: torch.Tensor) -> Blocks:
    """For each of 8 groups: four numbers of points, four of signs and a 4-bit scale above them."""
    mixed = words(blocks, 2, 16, torch.int32)[:, 1::2]
    numbers = blocks[:, 2:66].view(-1, 8, 8)[..., :4]
    codes = _points("IQ2_XXS", numbers) | _signs(_seven(mixed)) << 2
    return Blocks(codes, _odd(mixed >> 28 & 15), None, half(blocks, 0))


def iq2_xs(blocks: torch.Tensor) -> Blocks:
    """Numbers of 9 bits with one of signs above them, and 4-bit scales for 16 groups."""
    mixed = words(blocks, 2, 32, torch.int16)
    codes = _points("IQ2_XS", mixed & 511) | _signs(mixed >> 9) << 2
    return Blocks(codes, _odd(beside(blocks[:, 66:74], 4)), None, half(blocks, 0))


def iq2_s(blocks: torch.Tensor) -> Blocks:
    """Low bytes of numbers, signs, the two bits above the former, and 4-bit scales for 16 groups."""
    numbers = blocks[:, 2:34].int() | beside(blocks[:, 66:74], 2).int() << 8
    codes = _points("IQ2_S", numbers) | beside(blocks[:, 34:66], 1) << 2
    return Blocks(codes, _odd(beside(blocks[:, 74:82], 4)), None, half(blocks, 0))


def iq1_s(blocks: torch.Tensor) -> Blocks:
    """Low bytes of numbers; for each of 8 groups, the three bits above each of four, a 3-bit scale, and whether all is
    moved down, not up. What is moved down is the negative of points that are moved up."""
    mixed = words(blocks, 34, 8, torch.int16)
    above = (mixed[..., None] >> torch.arange(0, 12, 3) & 7).flatten(1)
    points = _points("IQ1_S", blocks[:, 2:34].int() | above << 8).view(-1, 8, 32)
    down = (mixed >> 15 & 1).to(torch.int8)
    codes = torch.where(down[..., None] > 0, 2 - points, points)
    return Blocks(codes, _odd(mixed >> 12 & 7) * (1 - 2 * down), None, half(blocks, 0))


def iq1_m(blocks: torch.Tensor) -> Blocks:
    """Low bytes of numbers; for each of these the three bits above it, and whether its 8 weights are moved down; four
    times 4-bit parts of the float16 number above four 3-bit scales."""
    mixed, scales = beside(blocks[:, 32:48], 4), words(blocks, 48, 4, torch.int16)
    points = _points("IQ1_M", blocks[:, :32].int() | (mixed & 7).int() << 8).view(-1, 32, 8)
    codes = points | (mixed >> 3)[..., None] << 2
    row = (scales >> 12 << torch.arange(0, 16, 4)).sum(1, keepdim=True).to(torch.int16).view(torch.float16)
    return Blocks(codes, _odd((scales[..., None] >> torch.arange(0, 12, 3) & 7).flatten(1)), None, row)
