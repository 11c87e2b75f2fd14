"""A convolution of channels over rows, `core.runtime.program.convolve` in Triton. Importing this module needs
triton."""

import triton
import triton.language as tl

from core.memory.codec.fast.gpu.floats import rounded
from core.runtime.program.gpu.exp import exp


def _keep(
    x: tl.tensor,
    own: tl.tensor,
    column: tl.tensor,
    known: tl.tensor,
    count: tl.tensor,
    x_stride: tl.tensor,
    S: tl.constexpr,
    SIZE: tl.constexpr,
) -> None:
    """Bring the states at `own` up to date: the last inputs of `count` rows, and before these those that were there."""
    j = tl.arange(0, SIZE)
    at = (count - S.size + j).to(tl.int64)[None, :]
    some = known[:, None] & (j < S.size)[None, :]
    old = tl.load(own[:, None] + (S.size + at), mask=some & (at < 0), other=0)
    new = tl.load(x + at * x_stride + column[:, None], mask=some & (at >= 0), other=0)
    value = tl.where(at < 0, old, rounded(new, own.dtype.element_ty))
    tl.debug_barrier()  # all threads have read what is overwritten
    tl.store(own[:, None] + j[None, :], value, mask=some)


keep = triton.jit(_keep)


def _channels(
    columns: tl.tensor, state: tl.tensor, STATE: tl.constexpr, S: tl.constexpr, BLOCK: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """A program's channels: their numbers, which of them there are, columns of x, and pointers to their states."""
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    known = c < S.channels
    column = tl.load(columns + c // S.strip, mask=known, other=0) + c % S.strip
    return c, known, column, state.to(tl.pointer_type(STATE)) + c * S.size


channels_of = triton.jit(_channels)


def _convolve(
    x: tl.tensor,
    columns: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    state: tl.tensor,
    out: tl.tensor,
    x_stride: tl.tensor,
    STATE: tl.constexpr,
    S: tl.constexpr,
    BLOCK: tl.constexpr,
    SIZE: tl.constexpr,
    KEEP: tl.constexpr,
) -> None:
    """S: core.runtime.program.convolve.Convolve. Programs: blocks of channels, rows. Inputs of strip i of channels are
    columns[i], int64, and those after it, of a row of x, fp32, x_stride numbers from one to the next; weight [size,
    channels] and bias [channels]; at the address `state` [channels, size] of type STATE, latest input last; out [rows,
    channels], fp32. KEEP, of the only row: the state is brought up to date. SIZE: a power of two, no less than the
    size."""
    TAPS: tl.constexpr = S.size
    c, known, column, own = channels_of(columns, state, STATE, S, BLOCK)
    row = tl.program_id(1).to(tl.int64)
    value = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(TAPS):
        at = row + (j + 1 - S.size) + tl.zeros_like(column)
        old = tl.load(own + (S.size + at), mask=known & (at < 0), other=0).to(tl.float32)
        new = tl.load(x + at * x_stride + column, mask=known & (at >= 0), other=0)
        new = rounded(new, STATE).to(tl.float32)
        by = tl.load(weight + j * S.channels + c, mask=known, other=0).to(tl.float32)
        value = tl.fma(by, tl.where(at < 0, old, new), value)
    if bias is not None:
        value += tl.load(bias + c, mask=known, other=0).to(tl.float32)
    tl.store(out + row * S.channels + c, tl.div_rn(value, 1.0 + exp(-value)), mask=known)
    if KEEP:
        keep(x, own, column, known, 1, x_stride, S, SIZE)


convolve = triton.jit(_convolve)


def _keep_inputs(
    x: tl.tensor,
    columns: tl.tensor,
    state: tl.tensor,
    count: tl.tensor,
    x_stride: tl.tensor,
    STATE: tl.constexpr,
    S: tl.constexpr,
    BLOCK: tl.constexpr,
    SIZE: tl.constexpr,
) -> None:
    """Bring the state up to date after `count` rows. Programs: blocks of channels."""
    _, known, column, own = channels_of(columns, state, STATE, S, BLOCK)
    keep(x, own, column, known, count, x_stride, S, SIZE)


keep_inputs = triton.jit(_keep_inputs)
