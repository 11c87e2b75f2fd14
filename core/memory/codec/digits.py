"""Every format of groups on a CPU in bf16, by torch's packed int4 product: a weight is one digit of 4 bits, or several.

A code that needs 8 bits is 16 * high + low: two digits, which are two int4 weights behind one another along the input
dimension, multiplied by x twice. Digit d of a weight counts (digit - 8) * scale[d] + zero[d]; weights of fewer bits are
spread to 4. Blobs stay what they are everywhere: `place` turns one into the other on the copy thread.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from core.memory.codec.base import Entries, PartSpec, SlotParts
from core.memory.codec.coded import scales
from core.memory.codec.formats import Format
from core.memory.codec.grouped import STEP, Grouped
from core.memory.codec.int4_cpu import block_rows, pack, pack_bytes, pack_table, product, unpack
from core.memory.codec.tables import TABLES

# nf4's values are no multiples of anything. These steps (and a shift) were searched for: two digits then miss weights
# by .35-.4 % (bf16 rounds them by .14 %), which takes nf4's own error from .1088 to .1090; 16 : 1 would miss by 1 %.
NF4 = ((0.0801736, 0.0742178), 0.1606476)
PACKED_ROWS = {1: 128, 2: 80}  # by digits: up to this many rows the packed product beats dequantising first
# measured: python -m core.memory.codec.measure


class Spread(NamedTuple):
    """Values as sums over d of (digits[d] - 8) * steps[d] + zeros[d], before a group's scale."""

    digits: tuple[tuple[int, ...], ...]     # [d][code], each 0..15
    steps: tuple[float, ...]
    zeros: tuple[float, ...]


BYTE = Spread((), (16.0, 1.0), (0.0, 8.0))  # a signed byte v: v + 128 = 16 * high + low


@functools.cache
def spread(name: str) -> Spread:
    """Two digits for a table of values: exact where they are whole multiples of a step, close for nf4 (see NF4)."""
    if name == "nf4":
        steps, shift = NF4
        grid = torch.tensor([[(high - 8) * steps[0] + (low - 8) * steps[1] for low in range(16)] for high in range(16)])
        at = [int((grid + shift - value).abs().argmin()) for value in TABLES[name]]
        return Spread((tuple(i // 16 for i in at), tuple(i % 16 for i in at)), steps, (shift, 0.0))
    step = 0.5 if name == "mxfp4" else 1.0
    whole = [round(value / step) + 128 for value in TABLES[name]]
    return Spread((tuple(v // 16 for v in whole), tuple(v % 16 for v in whole)), (16 * step, step), (0.0, 8 * step))


class Digits(Grouped):
    """Of a matrix a slot keeps (packed [out, digits * in / 2], scales [digits * in / group, out, 2])."""

    direct = True

    @functools.cached_property
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
            pack_table(q, packed, block, _table_words(self.format.table))
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
        digits = self.digits
        if x.shape[0] > PACKED_ROWS[digits]:
            return self.unpacked(parts, part, x)
        packed, steps = parts.weights[part]
        return product(torch.cat([x] * digits, 1) if digits > 1 else x, packed, self.format.group, steps)

    def weight(self, tensors: tuple[torch.Tensor, ...]) -> torch.Tensor:
        packed, scales = tensors
        rows = packed.shape[0]
        made = torch.empty(rows, packed.shape[1] * 2 // self.digits, dtype=self.dtype)
        steps = scales.view(self.digits, -1, rows, 2).permute(0, 3, 2, 1).float().contiguous()[..., None]
        for start in range(0, rows, STEP):
            at = slice(start, start + STEP)
            total: torch.Tensor | None = None
            for digit, (scale, zero) in enumerate(steps[:, :, at]):
                codes = unpack(packed[at], block_rows(), digit, self.digits).view(torch.int8).sub_(8)
                grouped = codes.view(codes.shape[0], scale.shape[1], -1).float()
                total = (torch.addcmul(zero, grouped, scale) if total is None
                         else total.add_(zero).addcmul_(grouped, scale))
            assert total is not None
            made[at] = total.view(codes.shape)
        return made


def supported(format: Format, specs: Mapping[str, PartSpec], dtype: torch.dtype, device: torch.device,
              is_transposed: bool) -> bool:
    """Whether torch's packed int4 product serves these matrices on this machine."""
    outs = [s.shape[1 if is_transposed else 0] for s in specs.values() if s.is_weight]
    return (device.type == "cpu" and dtype == torch.bfloat16 and format.group in (32, 64, 128, 256)
            and all(out % 16 == 0 for out in outs) and block_rows() > 0)


@functools.cache
def _factors(format: Format) -> torch.Tensor:
    """What a group's scale is multiplied by where there is no zero: [digits, 2], for digits' scales and zeros."""
    found = spread(format.table) if format.table else BYTE if format.bits == 8 else Spread((), (1.0,), (0.0,))
    with torch.inference_mode(False):
        return torch.tensor([found.steps, found.zeros]).t().contiguous()


@functools.cache
def _table_words(name: str) -> tuple[torch.Tensor, ...]:
    """For each digit: 4 codes of 4 bits -> their 4 digits, int16 [65536]."""
    return tuple(_words(digit, 4, 4).to(torch.int16) for digit in spread(name).digits)


@functools.cache
def _spread_words(bits: int) -> torch.Tensor:
    """8 codes of 2 bits, or the low bits of 3-bit codes -> 8 of 4 bits that count from -8: int32 [65536]."""
    return _words([code + 8 - (1 << bits - 1) for code in range(4)], 2, 8)


@functools.cache
def _high_bits() -> torch.Tensor:
    """The high bits of 8 codes of 3 bits -> what they add to `_spread_words(3)`: int32 [256]."""
    return _words([0, 4], 1, 8)


def _words(values: Sequence[int], bits: int, count: int) -> torch.Tensor:
    """Every word of `count` codes of `bits` bits -> the 4-bit `values` of its codes, int32."""
    with torch.inference_mode(False):
        words, table, found = torch.arange(1 << bits * count), torch.tensor(values), torch.zeros(1, dtype=torch.int64)
        for i in range(count):
            found = found | table[words >> bits * i & (1 << bits) - 1] << 4 * i
        return found.to(torch.int32)
