"""4 bits a weight on a CPU with AVX512 or AVX2, bf16: torch's packed int4 product, in the layout it wants.

The layout depends on the instruction set, so it exists only in slots: `place` rearranges a blob's bytes on the copy
thread (10x faster than torch's own packing) and `block_rows` checks once, against torch's packing, that it knows how.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch

from core.memory.codec.base import Layout, PartSpec, SlotParts
from core.memory.codec.int4 import Int4, dequantize

BLOCKS = {"AVX512": 64, "AVX2": 32}  # output rows that torch's kernel interleaves, by instruction set
PACKED_ROWS = 96  # up to this many rows the packed product beats dequantising first
# measured: python -m core.memory.codec.measure


class Int4Packed(Int4):
    """Slots hold each matrix as torch packs it, with scales and zeros interleaved; blobs are Int4's."""

    def __init__(self, specs: Mapping[str, PartSpec], dtype: torch.dtype, device: torch.device, is_transposed: bool,
                 group_size: int) -> None:
        super().__init__(specs, dtype, device, is_transposed, group_size)
        fields = self.bias_fields()
        for part in self.weights:
            out, columns = self.out_in(part)
            fields |= {f"{part}.packed": (torch.uint8, (out, columns // 2)),
                       f"{part}.scales": (dtype, (columns // group_size, out, 2))}
        self.slot_layout = Layout.of(fields)
        self._block = block_rows()

    def place(self, blob: torch.Tensor, slot: torch.Tensor) -> None:
        source, target = self.blob_layout.views(blob), self.slot_layout.views(slot)
        for name in self.biases:
            target[name].copy_(source[name])
        for name in self.weights:
            pack(source[f"{name}.q"], target[f"{name}.packed"], self._block)
            target[f"{name}.scales"][..., 0].copy_(source[f"{name}.scale"].t())
            target[f"{name}.scales"][..., 1].copy_(source[f"{name}.zero"].t())

    def views(self, slot: torch.Tensor) -> SlotParts:
        tensors = self.slot_layout.views(slot)
        return SlotParts({n: (tensors[f"{n}.packed"], tensors[f"{n}.scales"]) for n in self.weights},
                         {n: tensors[n] for n in self.biases})

    def linear(self, parts: SlotParts, part: str, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] > PACKED_ROWS:
            return super().linear(parts, part, x)
        packed, scales = parts.weights[part]
        y: torch.Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, self.group_size, scales)
        return y

    def weight(self, tensors: tuple[torch.Tensor, ...]) -> torch.Tensor:
        packed, scales = tensors
        return dequantize(unpack(packed, self._block), scales[..., 0].t().contiguous(), scales[..., 1].t().contiguous())


def pack(q: torch.Tensor, packed: torch.Tensor, block: int) -> None:
    """Rearrange nibbles from [out, in / 2] (even input low) to torch's order, written into `packed`.

    Of every `block` output rows, byte (input, j) holds row j low and row block / 2 + j high; of the rows left over,
    byte (input, j) holds rows 2j and 2j + 1.
    """
    rows, half = q.shape
    full = rows // block * block
    blocks = q[:full].view(-1, 2, block // 2, half)
    for low, high, into in (
            (blocks[:, 0], blocks[:, 1], packed[:full].view(-1, half, 2, block // 2)),
            (q[full::2][None], q[full + 1 :: 2][None], packed[full:].view(1, half, 2, (rows - full) // 2))):
        into[:, :, 0].copy_(((low & 15) | (high << 4)).transpose(1, 2))
        into[:, :, 1].copy_(((low >> 4) | (high & 0xF0)).transpose(1, 2))


def unpack(packed: torch.Tensor, block: int) -> torch.Tensor:
    """The inverse of `pack`, one code a byte: [out, in / 2] packed -> [out, in] uint8."""
    rows, columns = packed.shape[0], packed.shape[1] * 2
    full = rows // block * block
    codes = torch.empty(rows, columns, dtype=torch.uint8)
    blocks = packed[:full].view(-1, columns, block // 2).transpose(1, 2)
    into = codes[:full].view(-1, 2, block // 2, columns)
    into[:, 0].copy_(blocks & 15)
    into[:, 1].copy_(blocks >> 4)
    tail = packed[full:].view(columns, -1).t()
    codes[full::2].copy_(tail & 15)
    codes[full + 1 :: 2].copy_(tail >> 4)
    return codes


def supported(specs: Mapping[str, PartSpec], dtype: torch.dtype, device: torch.device, is_transposed: bool) -> bool:
    """Whether torch's packed product serves these matrices on this machine."""
    outs = [s.shape[1 if is_transposed else 0] for s in specs.values() if s.is_weight]
    return device.type == "cpu" and dtype == torch.bfloat16 and all(out % 16 == 0 for out in outs) and block_rows() > 0


@functools.cache
def block_rows() -> int:
    """How many rows this CPU's packing interleaves; 0 = a trial shows that it is not the one `pack` writes."""
    block = BLOCKS.get(torch.backends.cpu.get_cpu_capability(), 0)
    codes = (torch.arange(112 * 32) * 7 % 16).view(112, 32)
    q = (codes[:, ::2] | (codes[:, 1::2] << 4)).to(torch.uint8)
    ours = torch.empty_like(q)
    if not block:
        return 0
    pack(q, ours, block)
    return block if torch.equal(ours, torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.int(), 1)) else 0
