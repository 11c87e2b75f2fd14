"""Four products of 8-bit integers at once, and entries of tables: the only place that knows whether kernels are made
for NVIDIA's GPUs, which have an instruction for each, or for others (Triton's interpreter, AMD's GPUs). Both give the
same integers. Importing this module needs triton.
"""

import triton
import triton.language as tl
from torch.version import hip


def _dot4_by_ptx(a: tl.tensor, b: tl.tensor, c: tl.tensor) -> tl.tensor:
    """c + the sum of the products of four signed bytes of a and of b, all int32."""
    return tl.inline_asm_elementwise("dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], tl.int32, True, 1)


def _dot4_anywhere(a: tl.tensor, b: tl.tensor, c: tl.tensor) -> tl.tensor:
    for i in tl.static_range(4):
        c += ((a << 24 - 8 * i) >> 24) * ((b << 24 - 8 * i) >> 24)
    return c


def _chosen_by_ptx(low: tl.tensor, high: tl.tensor, which: tl.tensor) -> tl.tensor:
    """The bytes of an int32: each of the four lowest hexadecimal digits of `which` (0 to 7) chooses one of the eight
    bytes of `low` and `high`."""
    return tl.inline_asm_elementwise("prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [low, high, which], tl.int32, True, 1)


def _chosen_anywhere(low: tl.tensor, high: tl.tensor, which: tl.tensor) -> tl.tensor:
    found = (low ^ low) | (which ^ which)
    for i in tl.static_range(4):
        digit = (which >> 4 * i) & 7
        found |= ((tl.where(digit < 4, low, high) >> 8 * (digit & 3)) & 255) << 8 * i
    return found


ANYWHERE = triton.knobs.runtime.interpret or hip is not None
dot4 = triton.jit(_dot4_anywhere if ANYWHERE else _dot4_by_ptx)
chosen = triton.jit(_chosen_anywhere if ANYWHERE else _chosen_by_ptx)


def _entries(which: tl.tensor, upper: tl.tensor, TABLE: tl.constexpr) -> tl.tensor:
    """The entries of four codes, as bytes. `which`: the low three bits of each in a hexadecimal digit; `upper`: 3210,
    with 4 added to the digits of codes whose fourth bit is set."""
    low = chosen(tl.full((1,), TABLE[0], tl.int32), tl.full((1,), TABLE[1], tl.int32), which)
    high = chosen(tl.full((1,), TABLE[2], tl.int32), tl.full((1,), TABLE[3], tl.int32), which)
    return chosen(low, high, upper)


entries = triton.jit(_entries)


def _few_entries(codes: tl.tensor, TABLE: tl.constexpr) -> tl.tensor:
    """The entries of four codes, each a byte: of a table of at most eight."""
    digits = (codes | codes >> 4) & 0x00FF00FF
    digits |= digits >> 8
    last: tl.constexpr = TABLE[len(TABLE) - 1]
    return chosen(tl.full((1,), TABLE[0], tl.int32), tl.full((1,), last, tl.int32), digits)


few_entries = triton.jit(_few_entries)
