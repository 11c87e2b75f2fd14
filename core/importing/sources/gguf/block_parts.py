"""Parts of ggml's blocks that several of its types have."""

from typing import NamedTuple

import torch


class Blocks(NamedTuple):
    """What blocks hold, in order: as `QuantizedTensor` has it. `usable`: whether all of it means something."""

    codes: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None = None
    row: torch.Tensor | None = None
    usable: bool = True


def half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """A number of float16 of each block: [n, bytes] -> [n, 1]."""
    return blocks[:, at : at + 2].clone().view(torch.float16)


def halves(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """Two numbers of float16: [n, bytes] -> [n, 2]."""
    return blocks[:, at : at + 4].clone().view(torch.float16)


def words(blocks: torch.Tensor, at: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """`count` unsigned integers of 16 bits, or 32 bits as they are: [n, bytes] -> [n, count] int32."""
    found = blocks[:, at : at + count * dtype.itemsize].clone().view(dtype).int()
    return found & 0xFFFF if dtype == torch.int16 else found


def nibbles(packed: torch.Tensor) -> torch.Tensor:
    """[..., n] bytes -> [..., 2 n]: all low halves, then all high ones."""
    return torch.cat((packed & 15, packed >> 4), dim=-1)


def bits(packed: torch.Tensor, count: int) -> torch.Tensor:
    """[..., n] bytes -> [..., 8 / count, n]: all lowest bits, then all above them."""
    return packed[..., None, :] >> torch.arange(0, 8, count, dtype=torch.uint8)[:, None] & (1 << count) - 1


def beside(packed: torch.Tensor, count: int) -> torch.Tensor:
    """[..., n] bytes -> [..., n * 8 / count]: those of a byte side by side, the lowest first."""
    return bits(packed, count).transpose(-1, -2).flatten(-2)
