"""Four 8-bit integers at once: products, entries of tables, bits of bytes. The only place that knows whether kernels
are made for NVIDIA's GPUs, which have instructions for four, or for others (Triton's interpreter, AMD's GPUs). Both
give the same integers. Importing this module needs triton.
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


def moving(step: int) -> str:
    """Instructions that shift those of four bytes that are masked."""
    return f"{{.reg .b32 t; shr.u32 t, $1, {step}; xor.b32 t, t, $1; and.b32 t, t, $2; xor.b32 $0, $1, t;}}"


def keeping(low: int) -> str:
    """Instructions that leave these bits of four bytes."""
    return f"and.b32 $0, $1, {low * 0x01010101:#x};"


def finding(words: tuple[int, ...]) -> str:
    """Instructions that find the entries of four codes, each in a byte; in a table of at most 16."""
    digits = "shr.u32 t, $1, 4; or.b32 t, t, $1; prmt.b32 t, t, 0, 0x4420;"
    entries = [f"{word & 0xFFFFFFFF:#x}" for word in words]
    if len(words) < 4:
        return f"{{.reg .b32 t; {digits} prmt.b32 $0, {entries[0]}, {entries[-1]}, t;}}"
    low, low_more, high, high_more = entries
    return (
        f"{{.reg .b32 t, u, v; {digits} and.b32 u, t, 0x7777;"
        f" prmt.b32 v, {high}, {high_more}, u; prmt.b32 u, {low}, {low_more}, u;"
        " shr.u32 t, t, 1; and.b32 t, t, 0x4444; or.b32 t, t, 0x3210; prmt.b32 $0, u, v, t;}"
    )


def _taken_by_ptx(
    codes: tl.tensor, shift: tl.tensor, LOW: tl.constexpr, STEPS: tl.constexpr, MOVING: tl.constexpr, KEEP: tl.constexpr
) -> tl.tensor:
    """[rows, K] int8: the bits LOW of bytes `codes`, each shifted right by its column's `shift` [K], a sum of some of
    the STEPS, powers of two. A thread must have four bytes or more: whichever they are. MOVING: `moving` for each step;
    KEEP: `keeping` for LOW."""
    for i in tl.static_range(len(STEPS)):
        mask = tl.broadcast_to((0 - (shift // STEPS[i] & 1)).to(tl.int8)[None, :], codes.shape)
        codes = tl.inline_asm_elementwise(MOVING[i], "=r,r,r", [codes, mask], tl.int8, True, 4)
    return tl.inline_asm_elementwise(KEEP, "=r,r", [codes], tl.int8, True, 4)


def _taken_anywhere(
    codes: tl.tensor, shift: tl.tensor, LOW: tl.constexpr, STEPS: tl.constexpr, MOVING: tl.constexpr, KEEP: tl.constexpr
) -> tl.tensor:
    return ((codes.to(tl.int32) & 255) >> shift[None, :] & LOW).to(tl.int8)


def _entry_by_ptx(codes: tl.tensor, TABLE: tl.constexpr, FINDING: tl.constexpr) -> tl.tensor:
    """int8: the entries of codes, int8 from 0 to 15. FINDING: `finding` for the table."""
    return tl.inline_asm_elementwise(FINDING, "=r,r", [codes], tl.int8, True, 4)


def _entry_anywhere(codes: tl.tensor, TABLE: tl.constexpr, FINDING: tl.constexpr) -> tl.tensor:
    code = codes.to(tl.int32)
    LAST: tl.constexpr = len(TABLE) - 1
    word = tl.where(code < 4, TABLE[0], TABLE[min(1, LAST)])
    if LAST > 1:
        word = tl.where(code < 8, word, tl.where(code < 12, TABLE[2], TABLE[3]))
    return (word >> 8 * (code & 3)).to(tl.int8)


ANYWHERE = triton.knobs.runtime.interpret or hip is not None
taken = triton.jit(_taken_anywhere if ANYWHERE else _taken_by_ptx)
entry = triton.jit(_entry_anywhere if ANYWHERE else _entry_by_ptx)
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
