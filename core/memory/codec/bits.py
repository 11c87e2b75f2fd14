"""Codes of 2 to 6 bits packed into bytes, lowest bits first, along the input dimension.

3, 5 and 6 bits are two planes: the low two or four bits as codes of so many, and the one or two above them likewise.
"""

from collections.abc import Sequence

import torch

PLANES = {2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 8: (8,)}  # bits of a code in each packed tensor


def pack(codes: torch.Tensor, bits: int) -> list[torch.Tensor]:
    """Pack [out, in] uint8 below 2 ** bits (int8 for 8 bits, unchanged) into one tensor [out, in * plane / 8] per
    plane."""
    if bits == 8:
        return [codes]
    planes, below = [], 0
    for plane in PLANES[bits]:
        per = 8 // plane
        part = codes.view(codes.shape[0], -1, per) >> below & (1 << plane) - 1
        packed = part[..., 0].clone()
        for i in range(1, per):
            packed |= part[..., i] << plane * i
        planes.append(packed)
        below += plane
    return planes


def unpack(planes: Sequence[torch.Tensor], bits: int) -> torch.Tensor:
    """The inverse of `pack`: [out, in] uint8, or int8 for 8 bits."""
    if bits == 8:
        return planes[0]
    codes, below = None, 0
    for packed, plane in zip(planes, PLANES[bits], strict=True):
        per, mask = 8 // plane, (1 << plane) - 1
        part = torch.empty(*packed.shape, per, dtype=torch.uint8, device=packed.device)
        for i in range(per):
            torch.bitwise_and(packed >> plane * i, mask, out=part[..., i])
        codes = part if codes is None else codes.view_as(part) | part << below
        below += plane
    assert codes is not None
    return codes.view(codes.shape[0], -1)
