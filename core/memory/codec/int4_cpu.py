"""The bytes that torch's packed int4 product wants on a CPU with AVX512 or AVX2, written 10x faster than torch does.

The layout depends on the instruction set, so it exists only in slots; `block_rows` checks once, against torch's own
packing, that it is known here. Several digits of a weight lie behind one another along the input dimension.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import torch

_PRODUCT = torch.ops.aten._weight_int4pack_mm_for_cpu.default   # the overload: half the way there of its packet
BLOCKS = {"AVX512": 64, "AVX2": 32}  # output rows that torch's kernel interleaves, by instruction set


def targets(packed: torch.Tensor, block: int, digit: int = 0, digits: int = 1) -> Iterator[torch.Tensor]:
    """Where a digit's codes go in `packed` [out, digits * in / 2] uint8: bytes [blocks, in, rows / 2] for the
    whole blocks, then for the rows left over.

    Of every `block` output rows, byte (input, j) holds row j low and row block / 2 + j high; of the rows left over,
    byte (input, j) holds rows 2j and 2j + 1.
    """
    rows, columns = packed.shape[0], packed.shape[1] * 2 // digits
    full = rows // block * block
    if full:
        yield packed[:full].view(-1, digits, columns, block // 2)[:, digit]
    if full < rows:
        yield packed[full:].view(1, digits, columns, (rows - full) // 2)[:, digit]


def pairs(rows: torch.Tensor, block: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The rows [out, bytes] that go to the low and to the high halves, [blocks, rows / 2, bytes] each, as `targets`."""
    full = rows.shape[0] // block * block
    if full:
        blocks = rows[:full].view(-1, 2, block // 2, rows.shape[1])
        yield blocks[:, 0], blocks[:, 1]
    if full < rows.shape[0]:
        yield rows[full::2][None], rows[full + 1 :: 2][None]


def pack(q: torch.Tensor, packed: torch.Tensor, block: int) -> None:
    """Rearrange nibbles from [out, in / 2] (even input low) to torch's order, written into `packed`."""
    for (low, high), into in zip(pairs(q, block), targets(packed, block), strict=True):
        made = _scratch(low)
        torch.bitwise_left_shift(high, 4, out=made).bitwise_or_(low & 15)
        into[:, ::2].copy_(made.transpose(1, 2))
        torch.bitwise_and(high, 0xF0, out=made).bitwise_or_(low >> 4)
        into[:, 1::2].copy_(made.transpose(1, 2))


def pack_bytes(q: torch.Tensor, packed: torch.Tensor, block: int) -> None:
    """Rearrange signed bytes [out, in] to two digits: the high nibble counted from -8, then the low one."""
    q = q.view(torch.uint8)
    tops, bottoms = targets(packed, block, 0, 2), targets(packed, block, 1, 2)
    for (low, high), top, bottom in zip(pairs(q, block), tops, bottoms, strict=True):
        made = _scratch(low)
        torch.bitwise_and(high, 0xF0, out=made).bitwise_or_(low >> 4).bitwise_xor_(0x88)
        top.copy_(made.transpose(1, 2))
        torch.bitwise_left_shift(high, 4, out=made).bitwise_or_(low & 15)
        bottom.copy_(made.transpose(1, 2))


def pack_table(q: torch.Tensor, packed: torch.Tensor, block: int, words: Sequence[torch.Tensor]) -> None:
    """Rearrange nibbles [out, in / 2] to several digits; words[digit] (int16 [65536]) says what 4 codes become."""
    codes = torch.empty_like(q)
    pack(q, codes, block)
    index = codes.view(torch.uint16).to(torch.int32).view(-1)
    for digit, word in enumerate(words):
        made = word.index_select(0, index).view(torch.uint8).view(q.shape)
        for source, into in zip(targets(made, block), targets(packed, block, digit, len(words)), strict=True):
            into.copy_(source)


def _scratch(like: torch.Tensor) -> torch.Tensor:
    """An uninitialised tensor whose rows are a cache line apart more than they are long: rows of 2048 bytes would share
    a few sets of the cache, and turning them would take three times as long."""
    return torch.empty(*like.shape[:2], like.shape[2] + 64, dtype=torch.uint8)[..., : like.shape[2]]


def unpack(packed: torch.Tensor, block: int, digit: int = 0, digits: int = 1) -> torch.Tensor:
    """One digit's codes, one a byte: [out, digits * in / 2] packed -> [out, in] uint8."""
    rows, columns = packed.shape[0], packed.shape[1] * 2 // digits
    codes = torch.empty(rows, columns, dtype=torch.uint8)
    for (low, high), stored in zip(pairs(codes, block), targets(packed, block, digit, digits), strict=True):
        turned = stored.transpose(1, 2)
        low.copy_(turned & 15)
        high.copy_(turned >> 4)
    return codes


def product(x: torch.Tensor, packed: torch.Tensor, group: int, scales: torch.Tensor) -> torch.Tensor:
    """x [n, in] bf16 times packed weights with scales [in / group, out, 2] (scale, zero) -> [n, out]."""
    y: torch.Tensor = _PRODUCT(x, packed, group, scales)
    return y


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
