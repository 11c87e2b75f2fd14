"""Before attention to latents, `core.runtime.program.latent` in Triton. Importing this module needs triton."""

import triton
import triton.language as tl

from core.memory.codec.fast.gpu.floats import rounded
from core.runtime.program.gpu.rms import factor_of, scaled
from core.runtime.program.gpu.rotate import turned

AHEAD = tl.constexpr(8)  # steps whose numbers are read at once


def _latent(
    q: tl.tensor,
    kv: tl.tensor,
    weight: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    positions: tl.tensor,
    latents: tl.tensor,
    keys: tl.tensor,
    out: tl.tensor,
    q_stride: tl.tensor,
    kv_stride: tl.tensor,
    latent_row: tl.tensor,
    key_row: tl.tensor,
    CACHE: tl.constexpr,
    S: tl.constexpr,
    ROTATE: tl.constexpr,
    BLOCK: tl.constexpr,
    TURNED: tl.constexpr,
) -> None:
    """S: core.runtime.program.latent.Latent; ROTATE: core.runtime.program.rotate.Rotate of the numbers that are turned.
    Programs: the latent, with the part of keys that all heads share, and then heads; rows. q [rows, heads, keys +
    turned] and kv [rows, latent + turned], rows strides of numbers apart; cos and sin [context, turned / 2] of all
    positions; out [rows, heads, latent + turned], of which latents are left alone: all fp32. What position p leaves in
    the cache, of type CACHE, lies at `latents` + p * latent_row and `keys` + p * key_row bytes. BLOCK, TURNED: powers
    of two, no less than a latent and what is turned, and than 8."""
    index, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    W: tl.constexpr = S.norm.width
    place = tl.load(positions + row)
    cos += place * (S.turned // 2)
    sin += place * (S.turned // 2)
    some = tl.arange(0, TURNED)
    if index == 0:
        x = kv + row * kv_stride
        squares = tl.zeros((8,), tl.float32)
        for first in range(0, W // (8 * AHEAD) * 8 * AHEAD, 8 * AHEAD):
            for i in tl.static_range(AHEAD):
                value = tl.load(x + (first + 8 * i + tl.arange(0, 8)))
                squares = tl.fma(value, value, squares)
        for first in range(W // (8 * AHEAD) * 8 * AHEAD, W, 8):
            k = first + tl.arange(0, 8)
            value = tl.load(x + k, mask=k < W, other=0)
            squares = tl.fma(value, value, squares)
        factor = factor_of(squares, W, S.norm.eps)
        at = tl.arange(0, BLOCK)
        value = scaled(tl.load(x + at, mask=at < W, other=0), factor, weight, at, at < W, S.norm.offset)
        into = (latents + place * latent_row).to(tl.pointer_type(CACHE))
        tl.store(into + at, rounded(value, CACHE), mask=at < W)
        value = turned(x + W, None, None, None, cos, sin, some, some < S.turned, ROTATE)
        into = (keys + place * key_row).to(tl.pointer_type(CACHE))
        tl.store(into + some, rounded(value, CACHE), mask=some < S.turned)
    else:
        head = index - 1
        x = q + row * q_stride + head * (S.keys + S.turned) + S.keys
        value = turned(x, None, None, None, cos, sin, some, some < S.turned, ROTATE)
        tl.store(out + (row * S.heads + head) * (W + S.turned) + W + some, value, mask=some < S.turned)


latent = triton.jit(_latent)
