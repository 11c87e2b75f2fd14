"""Products of a row by dense matrices whose last program goes on with the result: norms it with the residual stream, or
chooses experts by it. What these two kernels save is a launch each. Importing this module needs triton."""

import triton
import triton.language as tl

from core.memory.codec.fast.gpu.joined import multiplied
from core.memory.codec.fast.gpu.last import is_last
from core.runtime.program.gpu.rms import normed
from core.runtime.program.gpu.route import routed


def _joined_normed(
    x: tl.tensor,
    out: tl.tensor,
    bias: tl.tensor,
    bases: tl.tensor,
    count: tl.tensor,
    stride: tl.tensor,
    out_stride: tl.tensor,
    counter: tl.tensor,
    states: tl.tensor,
    weight: tl.tensor,
    then: tl.tensor,
    into: tl.tensor,
    TOGETHER: tl.constexpr,
    CHUNK: tl.constexpr,
    J: tl.constexpr,
    N: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    R: tl.constexpr,
) -> None:
    """As `joined`, of one row; `out` is added to a row of the residual stream `states`, and `then` is the norm of that:
    as `normed` of core.runtime.program.gpu.rms."""
    multiplied(x, out, bias, bases, count, stride, out_stride, TOGETHER, CHUNK, J)
    if is_last(counter, J.programs):
        normed(states, out, weight, None, then, into, N, SCALE, BLOCK, BLOCKS, R)


joined_normed = triton.jit(_joined_normed)


def _joined_routed(
    x: tl.tensor,
    out: tl.tensor,
    bias: tl.tensor,
    bases: tl.tensor,
    count: tl.tensor,
    stride: tl.tensor,
    out_stride: tl.tensor,
    counter: tl.tensor,
    correction: tl.tensor,
    scales: tl.tensor,
    ids: tl.tensor,
    weights: tl.tensor,
    TOGETHER: tl.constexpr,
    CHUNK: tl.constexpr,
    J: tl.constexpr,
    R: tl.constexpr,
    EXPERTS: tl.constexpr,
    CHOSEN: tl.constexpr,
    GROUPS: tl.constexpr,
) -> None:
    """As `joined`, of one row; `out` are a router's logits: as `routed` of core.runtime.program.gpu.route."""
    multiplied(x, out, bias, bases, count, stride, out_stride, TOGETHER, CHUNK, J)
    if is_last(counter, J.programs):
        routed(out, correction, scales, ids, weights, R, EXPERTS, CHOSEN, GROUPS)


joined_routed = triton.jit(_joined_routed)
