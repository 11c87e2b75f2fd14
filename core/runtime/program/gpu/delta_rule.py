"""The gated delta rule and what it takes of a row, `core.runtime.program.delta_inputs` and `delta_rule` in Triton.
Importing this module needs triton."""

import triton
import triton.language as tl

from core.runtime.program.gpu.exp import exp, sigmoid, softplus
from core.runtime.program.gpu.rms import total

AHEAD = tl.constexpr(16)  # rows of a state that are read at once


def _per_root(squares: tl.tensor, EPS: tl.constexpr) -> tl.tensor:
    """[1]: 1 / sqrt(sum + eps), from the eight partial sums of squares."""
    return tl.div_rn(tl.full((1,), 1.0, tl.float32), tl.sqrt_rn(total(squares) + EPS))


per_root = triton.jit(_per_root)


def _norm(q: tl.tensor, k: tl.tensor, out: tl.tensor, S: tl.constexpr, BY: tl.constexpr) -> tl.tensor:
    """[1]: the sum of the products of a head's queries and keys, which are stored normed, keys S.key_heads *
    S.key_width numbers after queries."""
    W: tl.constexpr = S.key_width
    of_q = tl.zeros((8,), tl.float32)
    of_k = of_q
    for first in tl.static_range(0, W, 8):
        at = first + tl.arange(0, 8)
        some = tl.load(q + at, mask=at < W, other=0)
        of_q = tl.fma(some, some, of_q)
        some = tl.load(k + at, mask=at < W, other=0)
        of_k = tl.fma(some, some, of_k)
    q_factor, k_factor = per_root(of_q, S.eps), per_root(of_k, S.eps)
    products = tl.zeros((8,), tl.float32)
    for first in tl.static_range(0, W, 8):
        at = first + tl.arange(0, 8)
        one = tl.load(q + at, mask=at < W, other=0) * q_factor * BY
        other = tl.load(k + at, mask=at < W, other=0) * k_factor
        tl.store(out + at, one, mask=at < W)
        tl.store(out + S.key_heads * W + at, other, mask=at < W)
        products = tl.fma(one, other, products)
    return total(products)


norm = triton.jit(_norm)


def _inputs(
    mixed: tl.tensor,
    given: tl.tensor,
    a_columns: tl.tensor,
    b_columns: tl.tensor,
    a_log: tl.tensor,
    dt_bias: tl.tensor,
    normed: tl.tensor,
    products: tl.tensor,
    decays: tl.tensor,
    rates: tl.tensor,
    given_stride: tl.tensor,
    S: tl.constexpr,
    BY: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """S: core.runtime.program.delta_inputs.DeltaInputs; BY: 1 / sqrt(S.key_width). Programs: key heads, then blocks of
    value heads; rows. mixed [rows, S.stride] begins with queries, and then keys, [key_heads, key_width] each, which are
    normed into `normed` [rows, 2, key_heads, key_width]; a and b of value head i are a_columns[i] and b_columns[i],
    int64, of a row of `given`; products [rows, key_heads], decays and rates [rows, value_heads]. All are fp32."""
    index, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    KEYS: tl.constexpr = S.key_heads * S.key_width
    if index < S.key_heads:
        q = mixed + row * S.stride + index * S.key_width
        found = norm(q, q + KEYS, normed + row * 2 * KEYS + index * S.key_width, S, BY)
        tl.store(products + row * S.key_heads + index + tl.arange(0, 1), found)
    else:
        i = (index - S.key_heads) * BLOCK + tl.arange(0, BLOCK)
        known = i < S.value_heads
        given += row * given_stride
        a = tl.load(given + tl.load(a_columns + i, mask=known, other=0), mask=known, other=0)
        b = tl.load(given + tl.load(b_columns + i, mask=known, other=0), mask=known, other=0)
        a = softplus(a + tl.load(dt_bias + i, mask=known, other=0).to(tl.float32))
        slope = exp(tl.load(a_log + i, mask=known, other=0).to(tl.float32))
        tl.store(decays + row * S.value_heads + i, exp(-(slope * a)), mask=known)
        tl.store(rates + row * S.value_heads + i, sigmoid(b), mask=known)


inputs = triton.jit(_inputs)


def _read_line(
    q: tl.tensor, k: tl.tensor, own: tl.tensor, known: tl.tensor, a: tl.tensor, b: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    """The sums over keys and over queries, with a row of the state more."""
    s = tl.load(own, mask=known, other=0)
    zero = tl.zeros_like(s)
    return tl.fma(zero + tl.load(k), s, a), tl.fma(zero + tl.load(q), s, b)


read_line = triton.jit(_read_line)


def _change_line(
    k: tl.tensor, own: tl.tensor, into: tl.tensor, known: tl.tensor, d: tl.tensor, decay: tl.tensor
) -> None:
    """Bring a row of the state up to date."""
    s = tl.load(own, mask=known, other=0)
    tl.store(into, tl.fma(tl.zeros_like(s) + tl.load(k), d, decay * s), mask=known)


change_line = triton.jit(_change_line)


def _rule(
    normed: tl.tensor,
    mixed: tl.tensor,
    products: tl.tensor,
    decays: tl.tensor,
    rates: tl.tensor,
    state: tl.tensor,
    into: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    S: tl.constexpr,
    SLICE: tl.constexpr,
) -> None:
    """S: core.runtime.program.delta_rule.DeltaRule. Programs: slices of a state's columns, value heads; each takes all
    rows in order. normed, products, decays and rates as above; values follow queries and keys in a row of mixed [rows,
    S.channels]; the states [value_heads, key_width, value_width] at the address `state` are read by the first row, and
    `into` gets those after each; out [rows, value_heads, value_width]. All are fp32."""
    W: tl.constexpr = S.key_width
    KEYS: tl.constexpr = S.key_heads * W
    WHOLE: tl.constexpr = W // AHEAD * AHEAD
    head = tl.program_id(1)
    key_head = head // (S.value_heads // S.key_heads)
    n = tl.program_id(0) * SLICE + tl.arange(0, SLICE)
    known = n < S.value_width
    begin = head.to(tl.int64) * (W * S.value_width) + n
    new = into.to(tl.pointer_type(tl.float32)) + begin
    for row in range(rows):
        at = head.to(tl.int64) * 0 + row
        own = tl.where(at == 0, state, into).to(tl.pointer_type(tl.float32)) + begin
        q = normed + at * 2 * KEYS + key_head * W
        k = q + KEYS
        a = tl.zeros((SLICE,), tl.float32)
        b = a
        for first in range(0, WHOLE, AHEAD):
            for i in tl.static_range(AHEAD):
                line = first + i
                a, b = read_line(q + line, k + line, own + line * S.value_width, known, a, b)
        for i in tl.static_range(WHOLE, W):
            a, b = read_line(q + i, k + i, own + i * S.value_width, known, a, b)
        decay = tl.zeros_like(a) + tl.load(decays + at * S.value_heads + head)
        product = tl.zeros_like(a) + tl.load(products + at * S.key_heads + key_head)
        v = tl.load(mixed + at * S.channels + 2 * KEYS + head * S.value_width + n, mask=known, other=0)
        d = tl.fma(decay * -1.0, a, v) * tl.load(rates + at * S.value_heads + head)
        found = tl.fma(d, product, decay * b)
        tl.store(out + (at * S.value_heads + head) * S.value_width + n, found, mask=known)
        for first in range(0, WHOLE, AHEAD):
            for i in tl.static_range(AHEAD):
                line = first + i
                change_line(k + line, own + line * S.value_width, new + line * S.value_width, known, d, decay)
        for i in tl.static_range(WHOLE, W):
            change_line(k + i, own + i * S.value_width, new + i * S.value_width, known, d, decay)
        tl.debug_barrier()  # the next row reads what other threads may have written


rule = triton.jit(_rule)
