"""Every format of groups on a CPU in bf16, by torch's packed int4 product: a weight is one digit of 4 bits, or several.

A code that needs 8 bits is 16 * high + low: two digits, which are two int4 weights behind one another along the input
dimension, multiplied by x twice. Digit d of a weight counts (digit - 8) * scale[d] + zero[d]; weights of fewer bits are
spread to 4. Blobs stay what they are everywhere: `place` turns one into the other on the copy thread.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import NamedTuple

import torch

from core.memory.codec.base import Entries, PartSpec, SlotParts
from core.memory.codec.coded import scales
from core.memory.codec.formats import Format
from core.memory.codec.grouped import Grouped
from core.memory.codec.int4_cpu import block_rows, pack, pack_bytes, product, unpack
from core.memory.codec.tables import TABLES

PACKED_ROWS = {1: 96, 2: 48}  # by digits: up to this many rows the packed product beats dequantising first
# measured: python -m core.memory.codec.measure


class Spread(NamedTuple):
    """How a table's values are written in digits: value = sum over d of (digits[d][code] - 8) * steps[d] + offsets[d]."""

    digits: tuple[tuple[int, ...], ...]     # [d][code], each 0..15
    steps: tuple[float, ...]
    offsets: tuple[float, ...]


@functools.cache
def spread(name: str) -> Spread:
    """Two digits for a table: exact where its values are whole multiples of a step."""
    step = 0.5 if name == "mxfp4" else 1.0
    whole = [round(value / step) + 128 for value in TABLES[name]]
    return Spread((tuple(v >> 4 for v in whole), tuple(v & 15 for v in whole)), (16 * step, step), (0.0, 8 * step))


class Digits(Grouped):
    """Of a matrix a slot keeps (packed [out, digits * in / 2], scales [digits * in / group, out, 2])."""

    @property
    def digits(self) -> int:
        """How many int4 weights stand for one."""
        return 2 if self.format.table or self.format.bits == 8 else 1

    def slot_entries(self, blob: Entries) -> Entries:
        entries: Entries = {n: (self.dtype, self.specs[n].shape) for n in self.biases}
        for part in self.weights:
            out, columns = self.out_in(part)
            wide = columns * self.digits
            entries |= {f"{part}.packed": (torch.uint8, (out, wide // 2)),
                        f"{part}.scales": (self.dtype, (wide // self.format.group, out, 2))}
        return entries

    def place(self, blob: torch.Tensor, slot: torch.Tensor) -> None:
        source, target = self.blob_layout.views(blob), self.slot_layout.views(slot)
        for name in self.biases:
            target[name].copy_(source[name])
        for name in self.weights:
            self._place_codes(source, name, target[f"{name}.packed"])
            self._place_scales(source, name, target[f"{name}.scales"])

    def _place_codes(self, source: Mapping[str, torch.Tensor], part: str, packed: torch.Tensor) -> None:
        q, block = source[f"{part}.q"], block_rows()
        if self.format.bits == 8:
            pack_bytes(q, packed, block)
        elif self.format.table:
            words = q.view(torch.uint16).to(torch.int32).view(-1)
            for digit, lut in enumerate(_table_words(self.format.table)):
                pack(lut.index_select(0, words).view(torch.uint8).view(q.shape), packed, block, digit, self.digits)
        elif self.format.bits < 4:
            words = _spread_words(self.format.bits).index_select(0, q.view(torch.uint16).to(torch.int32).view(-1))
            if self.format.bits == 3:
                words += _high_bits().index_select(0, source[f"{part}.q1"].to(torch.int32).view(-1))
            pack(words.view(torch.uint8).view(q.shape[0], -1), packed, block)
        else:
            pack(q, packed, block)

    def _place_scales(self, source: Mapping[str, torch.Tensor], part: str, into: torch.Tensor) -> None:
        scale = source[f"{part}.scale"].t()
        if self.format.zero:
            into[..., 0].copy_(scale)
            into[..., 1].copy_(source[f"{part}.zero"].t())
        else:
            factors = _factors(self.format)[:, None, None]
            torch.mul(scales(scale)[..., None], factors, out=into.view(self.digits, *scale.shape, 2))

    def views(self, slot: torch.Tensor) -> SlotParts:
        tensors = self.slot_layout.views(slot)
        return SlotParts({n: (tensors[f"{n}.packed"], tensors[f"{n}.scales"]) for n in self.weights},
                         {n: tensors[n] for n in self.biases})

    def linear(self, parts: SlotParts, part: str, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] > PACKED_ROWS[self.digits]:
            return super().linear(parts, part, x)
        packed, steps = parts.weights[part]
        return product(torch.cat([x] * self.digits, 1) if self.digits > 1 else x, packed, self.format.group, steps)

    def weight(self, tensors: tuple[torch.Tensor, ...]) -> torch.Tensor:
        packed, steps = tensors
        rows, block = packed.shape[0], block_rows()
        total: torch.Tensor | None = None
        for digit, step in enumerate(steps.view(self.digits, -1, rows, 2)):
            scale, zero = step.permute(2, 1, 0).float().contiguous()[..., None]
            codes = unpack(packed, block, digit, self.digits).view(torch.int8).sub_(8)
            grouped = codes.view(rows, scale.shape[1], -1).float()
            total = torch.addcmul(zero, grouped, scale) if total is None else total.add_(zero).addcmul_(grouped, scale)
        assert total is not None
        return total.to(self.dtype).view(rows, -1)


def supported(format: Format, specs: Mapping[str, PartSpec], dtype: torch.dtype, device: torch.device,
              is_transposed: bool) -> bool:
    """Whether torch's packed int4 product serves these matrices on this machine."""
    outs = [s.shape[1 if is_transposed else 0] for s in specs.values() if s.is_weight]
    return (device.type == "cpu" and dtype == torch.bfloat16 and format.group in (32, 64, 128, 256)
            and all(out % 16 == 0 for out in outs) and block_rows() > 0)


@functools.cache
def _factors(format: Format) -> torch.Tensor:
    """What a symmetric group's scale is multiplied by: [digits, 2] for the steps and the zeros of the digits."""
    two = spread(format.table) if format.table else Spread((), (16.0, 1.0), (0.0, 8.0))
    with torch.inference_mode(False):
        if not format.table and format.bits == 4:
            return torch.tensor([[1.0, 0.0]])
        return torch.tensor([two.steps, two.offsets]).t().contiguous()


@functools.cache
def _table_words(name: str) -> tuple[torch.Tensor, ...]:
    """For each digit: 4 codes (16 bits) -> their 4 digits, int16 [65536]."""
    with torch.inference_mode(False):
        words = torch.arange(1 << 16)
        found = []
        for values in spread(name).digits:
            digit = torch.tensor(values)
            found.append(sum(digit[words >> 4 * i & 15] << 4 * i for i in range(4)).to(torch.int16))  # type: ignore
        return tuple(found)


@functools.cache
def _spread_words(bits: int) -> torch.Tensor:
    """8 codes of 2 bits -> 8 of 4 bits that count from -8: int32 [65536]; the low bits of 3-bit codes likewise."""
    with torch.inference_mode(False):
        words, shift = torch.arange(1 << 16), 8 - (1 << bits - 1)
        return sum((words >> 2 * i & 3) + shift << 4 * i for i in range(8)).to(torch.int32)  # type: ignore


@functools.cache
def _high_bits() -> torch.Tensor:
    """The high bits of 8 codes of 3 bits, where `_spread_words(3)` leaves room for them: int32 [256]."""
    with torch.inference_mode(False):
        words = torch.arange(1 << 8)
        return sum((words >> i & 1) << 4 * i + 2 for i in range(8)).to(torch.int32)  # type: ignore
