"""Numbers of slots in fp32, the tree over eight sums, rounding. Importing this module needs triton."""

import triton
import triton.language as tl

from core.memory.codec.kernels.gemv import four_and_three


def _lanes(one: tl.tensor) -> tl.tensor:
    """What there is of each lane, as [1, lanes, 1, 1]; one for all stays as it is."""
    return one[None, :, None, None] if one.type.is_block() else one


lanes = triton.jit(_lanes)


def _known_number(at: tl.tensor, known: tl.tensor, TYPE: tl.constexpr) -> tl.tensor:
    """The numbers at addresses as fp32; a uint8 is an exponent, 2 ** (e - 127), 255 = NaN. 0 where not `known`."""
    other: tl.constexpr = None if known is None else 0
    if tl.float8e4nv == TYPE:  # a type that some GPUs do not know, even of pointers
        found = four_and_three(tl.load(at.to(tl.pointer_type(tl.int8)), mask=known, other=other))
    elif tl.uint8 == TYPE:
        bits = tl.load(at.to(tl.pointer_type(TYPE)), mask=known, other=other).to(tl.int32)
        odd = ((bits == 0) | (bits == 255)).to(tl.int32)  # subnormal, and NaN
        found = (bits << 23 | odd << 22).to(tl.float32, bitcast=True)
    else:
        found = tl.load(at.to(tl.pointer_type(TYPE)), mask=known, other=other).to(tl.float32)
    return found


number = triton.jit(_known_number)


def _tree(sums: tl.tensor) -> tl.tensor:
    """[D, L, T, 8] -> [D, L, T]: p[j] = A[j] + A[j + 4]; (p[0] + p[2]) + (p[1] + p[3])."""
    D: tl.constexpr = sums.shape[0]
    L: tl.constexpr = sums.shape[1]
    T: tl.constexpr = sums.shape[2]
    for i in tl.static_range(3):
        halves = tl.permute(tl.reshape(sums, (D, L, T, 2, 4 >> i)), (0, 1, 2, 4, 3))
        low, high = tl.split(halves)
        sums = low + high
    return tl.reshape(sums, (D, L, T))


tree = triton.jit(_tree)


def _rounded(value: tl.tensor, TYPE: tl.constexpr) -> tl.tensor:
    """fp32 in another number type, to nearest, ties to even. To bf16 by integers: Triton's interpreter cuts off."""
    if tl.bfloat16 == TYPE:
        bits = value.to(tl.uint32, bitcast=True)
        bits = tl.where(value == value, bits + 0x7FFF + ((bits >> 16) & 1), 0x7FC00000)
        return (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return value.to(TYPE)


rounded = triton.jit(_rounded)
