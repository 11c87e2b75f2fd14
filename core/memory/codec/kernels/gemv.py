"""Matrix-vector kernels: states times the matrices of several experts, each expert in its own slot.

Slots are passed as addresses, so that one launch covers experts wherever they are. Where the host knows which experts,
addresses are launch arguments. Where it does not, `bases` is a table on the device of where each expert of the layer
is, and `ids` [programs of axis 1] int64 says which of them; an address may then also be one of pinned host memory that
the device can read. Weights are dequantised in registers only. Sums are fp32, in a fixed order: the same inputs give
the same bits, however the addresses were passed and wherever the weights are.

The kernels read the layouts of core.memory.codec.grouped and .plain. Importing this module needs triton.
"""

import triton
import triton.language as tl


def _address(bases: tl.tensor, ids: tl.tensor, LANES: tl.constexpr) -> tl.tensor:
    """The slot address for this program: program_id(1) of up to LANES; 0: of as many as there are `ids`."""
    lane = tl.program_id(1)
    if LANES == 0:
        base = tl.load(bases + tl.load(ids + lane))
    else:
        base = bases[0].to(tl.int64)
        for i in tl.static_range(1, LANES):
            base = tl.where(lane == i, bases[i].to(tl.int64), base)
    return base


address = triton.jit(_address)


def _inside(base: tl.tensor, field_at: tl.tensor, TYPE: tl.constexpr) -> tl.tensor:
    """A field of a slot. Fields are aligned (core.memory.codec.base.ALIGN), which the compiler cannot infer."""
    return tl.multiple_of((base + field_at).to(tl.pointer_type(TYPE)), 16)


inside = triton.jit(_inside)


def _four_and_three(value: tl.tensor) -> tl.tensor:
    """int8 with the bits of e4m3 as fp32."""
    low = value.to(tl.int32) & 0x7F
    bits = low << 7 | (low == 0x7F).to(tl.int32) * 0x7C00 | (value.to(tl.int32) & 0x80) << 8
    return bits.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0


four_and_three = triton.jit(_four_and_three)


def _number(base: tl.tensor, field_at: tl.tensor, at: tl.tensor, known: tl.tensor, TYPE: tl.constexpr) -> tl.tensor:
    """Scales, zeros or biases as fp32; a uint8 is an exponent, 2 ** (e - 127), where 255 is NaN; e4m3, which few GPUs
    convert themselves, is read as fp16, whose exponents begin 8 lower."""
    if tl.float8e4nv == TYPE:  # a type that some GPUs do not know, even of pointers
        number = four_and_three(tl.load(inside(base, field_at, tl.int8) + at, mask=known, other=0))
    elif tl.uint8 == TYPE:
        bits = tl.load(inside(base, field_at, TYPE) + at, mask=known, other=0).to(tl.int32)
        odd = ((bits == 0) | (bits == 255)).to(tl.int32)  # subnormal, and NaN
        number = (bits << 23 | odd << 22).to(tl.float32, bitcast=True)
    else:
        number = tl.load(inside(base, field_at, TYPE) + at, mask=known, other=0).to(tl.float32)
    return number


number = triton.jit(_number)


def _coded_rows(
    x: tl.tensor,
    out: tl.tensor,
    table: tl.tensor,
    bases: tl.tensor,
    ids: tl.tensor,
    q_at: tl.tensor,
    q1_at: tl.tensor,
    scale_at: tl.tensor,
    zero_at: tl.tensor,
    row_at: tl.tensor,
    bias_at: tl.tensor,
    stride: tl.tensor,
    LANES: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    G: tl.constexpr,
    BITS: tl.constexpr,
    TABLE: tl.constexpr,
    SCALE: tl.constexpr,
    ZERO: tl.constexpr,
    ROW: tl.constexpr,
    WIDE: tl.constexpr,
    OFFSET: tl.constexpr,
    STEP: tl.constexpr,
    BIAS: tl.constexpr,
    WORD: tl.constexpr,
    ABOVE: tl.constexpr,
    V: tl.constexpr,
    BN: tl.constexpr,
    BU: tl.constexpr,
) -> None:
    """out[p, n] = sum over k of x[p * stride + k] * W_p[n, k] (+ bias_p[n]); W_p [N, K] coded, one WORD per V inputs.

    `row_at` is of the scales of rows (ROW), or of what integer scales and zeros of WIDE inputs are multiplied by.

    Codes are masked in place instead of shifted; x is scaled by the power of two that compensates.
    """
    base = address(bases, ids, LANES)
    pair, n = tl.program_id(1), tl.program_id(0) * BN + tl.arange(0, BN)
    row, u = tl.minimum(n, N - 1)[:, None], tl.arange(0, BU)
    state = x + pair.to(tl.int64) * stride
    MASK: tl.constexpr = (1 << STEP) - 1
    HIGH: tl.constexpr = BITS - STEP  # bits that are stored apart
    sums = tl.zeros((BN, BU), tl.float32)
    for start in range(0, K // V, BU):
        unit = start + u
        known, at = (unit < K // V)[None, :], row * (K // V) + unit[None, :]
        word = tl.load(inside(base, q_at, WORD) + at, mask=known, other=0).to(tl.uint32)
        if BITS == 8:
            word = word ^ 0x80808080
        if HIGH:
            high = tl.load(inside(base, q1_at, ABOVE) + at, mask=known, other=0).to(tl.uint32)
        part, total = tl.zeros((BN, BU), tl.float32), tl.zeros((BU,), tl.float32)
        for v in tl.static_range(V):
            xs = tl.load(state + unit * V + v, mask=unit < K // V, other=0).to(tl.float32)
            total += xs
            if TABLE:
                code = (word >> (STEP * v)) & MASK
                if HIGH:
                    code |= ((high >> (HIGH * v)) & ((1 << HIGH) - 1)) << STEP
                part += tl.load(table + code) * xs[None, :]
            else:
                part += (word & (MASK << (STEP * v))).to(tl.float32) * (xs * (1.0 / (1 << (STEP * v))))[None, :]
            if HIGH and not TABLE:
                bit = (high & (((1 << HIGH) - 1) << (HIGH * v))).to(tl.float32)
                part += bit * (xs * ((1 << STEP) / (1 << (HIGH * v))))[None, :]
        if OFFSET:
            part -= (OFFSET * total)[None, :]
        if G:
            group = row * (K // G) + (unit * V // G)[None, :]
            part *= number(base, scale_at, group, known, SCALE)
            if WIDE:
                EACH: tl.constexpr = 1 if ZERO is None else 2
                shared = (row * (K // WIDE) + (unit * V // WIDE)[None, :]) * EACH
                part *= number(base, row_at, shared, known, tl.float16)
            if ZERO is not None:
                zero = number(base, zero_at, group, known, ZERO)
                if WIDE:
                    zero *= number(base, row_at, shared + 1, known, tl.float16)
                part += zero * total[None, :]
        sums += part
    y = tl.sum(sums, 1)
    if not G:
        y *= number(base, scale_at, n, n < N, SCALE)
    if ROW:
        y *= number(base, row_at, n, n < N, tl.float32)
    if BIAS:
        y += number(base, bias_at, n, n < N, x.dtype.element_ty)
    tl.store(out + pair.to(tl.int64) * N + n, y.to(out.dtype.element_ty), mask=n < N)


coded_rows = triton.jit(_coded_rows)


def _plain_rows(
    x: tl.tensor,
    out: tl.tensor,
    bases: tl.tensor,
    ids: tl.tensor,
    q_at: tl.tensor,
    bias_at: tl.tensor,
    stride: tl.tensor,
    LANES: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    BIAS: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
) -> None:
    """As `_coded_rows` for weights [N, K] of x's number type."""
    base = address(bases, ids, LANES)
    pair, n = tl.program_id(1), tl.program_id(0) * BN + tl.arange(0, BN)
    row, k = tl.minimum(n, N - 1)[:, None], tl.arange(0, BK)
    state, weights = x + pair.to(tl.int64) * stride, inside(base, q_at, x.dtype.element_ty)
    sums = tl.zeros((BN, BK), tl.float32)
    for start in range(0, K, BK):
        at = start + k
        xs = tl.load(state + at, mask=at < K, other=0).to(tl.float32)
        weight = tl.load(weights + row * K + at[None, :], mask=(at < K)[None, :], other=0).to(tl.float32)
        sums += weight * xs[None, :]
    y = tl.sum(sums, 1)
    if BIAS:
        y += number(base, bias_at, n, n < N, x.dtype.element_ty)
    tl.store(out + pair.to(tl.int64) * N + n, y.to(out.dtype.element_ty), mask=n < N)


plain_rows = triton.jit(_plain_rows)


def _plain_columns(
    x: tl.tensor,
    out: tl.tensor,
    bases: tl.tensor,
    ids: tl.tensor,
    q_at: tl.tensor,
    bias_at: tl.tensor,
    stride: tl.tensor,
    LANES: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    BIAS: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
) -> None:
    """As `_coded_rows` for weights that the model stores transposed: [K, N]."""
    base = address(bases, ids, LANES)
    pair, n, k = tl.program_id(1), tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, BK)
    state, weights = x + pair.to(tl.int64) * stride, inside(base, q_at, x.dtype.element_ty)
    sums = tl.zeros((BK, BN), tl.float32)
    for start in range(0, K, BK):
        at = start + k
        xs = tl.load(state + at, mask=at < K, other=0).to(tl.float32)
        known = (at < K)[:, None] & (n < N)[None, :]
        sums += tl.load(weights + at[:, None] * N + n[None, :], mask=known, other=0).to(tl.float32) * xs[:, None]
    y = tl.sum(sums, 0)
    if BIAS:
        y += number(base, bias_at, n, n < N, x.dtype.element_ty)
    tl.store(out + pair.to(tl.int64) * N + n, y.to(out.dtype.element_ty), mask=n < N)


plain_columns = triton.jit(_plain_columns)
