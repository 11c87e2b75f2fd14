"""Integer codes with a scale per group, as in GPTQ, AWQ, HQQ and torchao, and their conversion to our formats."""

from typing import NamedTuple

import torch

from core.importing.sources.decoded import QuantizedWeight, rows
from core.memory.codec.coded import QuantizedTensor

GROUPS = {4: (128, 64, 32), 3: (64,), 2: (64,)}
"""Group sizes of our formats with zero points, by bits."""


class Integers(NamedTuple):
    """weight = (code - point) * scale, in fp32. Groups are runs of columns unless `order` says otherwise."""

    bits: int
    codes: torch.Tensor  # [out, in] uint8
    scale: torch.Tensor  # [out, groups] fp16, bf16 or fp32
    points: torch.Tensor | None  # [out, groups] integers, or any floats; None: 2 ** (bits - 1) everywhere
    order: torch.Tensor | None  # [in] each column's group; None: consecutive groups of equal size

    @property
    def middle(self) -> int:
        """The code of weight 0 in a symmetric format."""
        return 1 << (self.bits - 1)

    def dequantize(self) -> torch.Tensor:
        """[out, in] fp32."""
        points = self.middle if self.points is None else self.points.float()[..., None]
        if self.order is not None:
            columns = self.order.long()
            shift = self.middle if self.points is None else self.points.float()[:, columns]
            return (self.codes.float() - shift) * self.scale.float()[:, columns]
        groups = self.codes.view(*self.scale.shape, -1).float()
        return ((groups - points) * self.scale.float()[..., None]).view(self.codes.shape)

    def coded(self, symmetric: bool, by_row: bool) -> QuantizedTensor | None:
        """As codes of one of our formats; None when none is exact. `symmetric`: without zeros, if the codes allow it;
        `by_row`: a single scale per row is a row scale, not a group that happens to be as wide.

        (code - middle) * scale + (middle - point) * scale is exact in fp32 for 16-bit scales and integer points: no
        term needs more than 24 bits. So it is for most points that are floats, where both have 16 bits; otherwise a
        term is rounded to fp32, by at most 2 ** -24 of itself. A scale is repeated over several of our groups where the
        checkpoint's are larger.
        """
        if self.order is not None:
            return None
        middle = self.points is None or bool((self.points == self.middle).all())
        group = self.codes.shape[1] // self.scale.shape[1]
        if self.bits == 8:
            return self._eight(group, by_row) if middle else None
        ours = fitting(self.bits, group)
        if ours is None:
            return None
        scale = self.scale.repeat_interleave(group // ours, 1)
        if self.bits == 4 and middle and (symmetric or self.points is None):
            return QuantizedTensor(f"int4-g{ours}-sym", self.codes, scale, None)
        if self.points is None or (self.scale.dtype == torch.float32 and not self.points.is_floating_point()):
            return None
        zero = ((self.middle - self.points.double()) * self.scale.double()).float()
        return QuantizedTensor(
            f"int4-g{ours}" if self.bits == 4 else f"int{self.bits}",
            self.codes,
            scale,
            zero.repeat_interleave(group // ours, 1),
        )

    def _eight(self, group: int, by_row: bool) -> QuantizedTensor | None:
        codes = (self.codes ^ 0x80).view(torch.int8)  # code - 128
        if self.scale.shape[1] == 1 and by_row:
            return QuantizedTensor("int8", codes, self.scale, None)
        return (
            QuantizedTensor("int8-g32", codes, self.scale.repeat_interleave(group // 32, 1), None)
            if group % 32 == 0
            else None
        )


class IntegerMatrix(QuantizedWeight):
    """A weight stored as `Integers`."""

    symmetric = False  # as stated by the checkpoint
    by_row = False

    def unpack(self) -> Integers:
        """Read and unpack the stored tensors."""
        raise NotImplementedError

    def read(self, row: int | None) -> torch.Tensor:
        return rows(self.unpack().dequantize(), row)

    def coded(self, row: int | None) -> QuantizedTensor | None:
        coded = self.unpack().coded(self.symmetric, self.by_row)
        if coded is None or row is None:
            return coded
        return QuantizedTensor(coded.format, *(None if t is None else rows(t, row) for t in coded[1:]))  # type: ignore[arg-type]


def fitting(bits: int, group: int) -> int | None:
    """The largest group of our formats with zero points that divides one of `group` codes; None where none does."""
    return next((size for size in GROUPS.get(bits, ()) if group % size == 0), None)


def order_of(index: torch.Tensor, groups: int) -> torch.Tensor | None:
    """Convert a stored group index [in] to `Integers.order`: None for consecutive groups of equal size, or when none is
    given (-1)."""
    columns = len(index)
    least, most = int(index.min()), int(index.max())
    if (least < 0 and most >= 0) or most >= groups:
        raise ValueError(f"its columns name groups from {least} to {most}, of {groups} groups")
    if columns % groups == 0 and (
        torch.equal(index.long(), torch.arange(columns) // (columns // groups)) or bool((index == -1).all())
    ):
        return None
    return index


def unpacked(words: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 [n, m] -> uint8 [n, 32 / bits * m], 4 or 8 bits per code, lowest first."""
    raw = words.contiguous().view(torch.uint8)
    return raw if bits == 8 else torch.stack((raw & 15, raw >> 4), -1).view(raw.shape[0], -1)
