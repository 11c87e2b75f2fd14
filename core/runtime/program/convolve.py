"""A causal convolution of each channel over the rows of a sequence, and silu.

A channel's input x[t] is rounded to the type of the states, which hold the last `size` of them: so those of this call
and those of earlier ones are the same numbers. With weights w, s begins at 0, and takes w[j] * x[t - size + 1 + j] by
fma, j = 0 first; + bias; and the result is s / (1 + exp(-s)).
"""

import functools
from dataclasses import dataclass

import torch

from core.runtime.program.exp import one_plus_exp
from core.runtime.program.vectors import FLOATS, LANES, WIDTH, ZERO, Kernel, pieces
from core.system.native import numbers

FIELDS = ("x", "columns", "weight", "bias", "state", "out", "x_stride", "rows")
FP32 = torch.float32


@dataclass(frozen=True)
class Convolve:
    """Over `size` inputs of each of `channels`, which are computed by `strip`. `weight`: the type of weights and of
    biases, where there are any. `holds`: the state stays as it is."""

    channels: int
    strip: int
    size: int
    state: torch.dtype
    weight: torch.dtype
    bias: bool = False
    holds: bool = False

    def __post_init__(self) -> None:
        assert self.channels % self.strip == 0

    @property
    def units(self) -> int:
        return self.channels // self.strip


@functools.cache
def kernel(spec: Convolve) -> int:
    """The address of the kernel. Unit i is strip i of channels, of all rows in order. Its inputs are columns[i], i64,
    and those after it, of a row of x, fp32, x_stride bytes from one to the next; weight [size, channels] and bias
    [channels]; state [channels, size], latest input last, is brought up to date unless it `holds`; out [rows,
    channels], fp32."""
    code, strip, size = Kernel("convolve"), spec.strip, spec.size
    taps = [code.stack(-(-strip // LANES) * WIDTH) for _ in range(size)]
    at = code.fields(FIELDS, ("x_stride", "rows"))
    with code.loop("%from", "%to") as unit:
        first = code.times(unit.index, strip)
        state = code.at(at["state"], first, size * spec.state.itemsize)
        weight, bias = (code.at(at[name], first, spec.weight.itemsize) for name in ("weight", "bias"))
        x = code.at(at["x"], code.integer(at["columns"], unit.index), 4)
        out = code.at(at["out"], first, 4)
        for begin, count in pieces(strip):
            _unpack(code, spec, state, begin, count, taps)
        with code.loop(0, at["rows"]) as row:
            given = code.at(x, code.times(row.index, at["x_stride"]))
            into = code.at(out, row.index, spec.channels * 4)
            for some in code.over(strip):
                new = numbers.load(code, given, *some.span, FP32)
                new = code.padded("float", numbers.again(code, new, some.count, spec.state), some.count, LANES)
                inputs = [*(code.load(FLOATS, code.at(tap, some.first, 4), WIDTH) for tap in taps[1:]), new]
                value = ZERO
                for j, one in enumerate(inputs):
                    code.store(FLOATS, one, code.at(taps[j], some.first, 4), WIDTH)
                    weights = code.at(weight, j * spec.channels * spec.weight.itemsize)
                    value = code.fma(code.read(weights, *some.span, spec.weight), one, value)
                if spec.bias:
                    value = code.op("fadd", value, code.read(bias, *some.span, spec.weight))
                exponent = code.let(f"fneg {FLOATS} {value}")
                code.write(code.op("fdiv", value, one_plus_exp(code, exponent)), into, *some.span, FP32)
        for begin, count in () if spec.holds else pieces(strip):
            _pack(code, spec, state, begin, count, taps)
    return code.address()


def _unpack(code: Kernel, spec: Convolve, state: str, first: int, count: int, taps: list[str]) -> None:
    """Write some channels' last inputs, each tap's by channel."""
    kept = count * spec.size
    value = numbers.load(code, state, first * spec.size, kept, spec.state)
    for j, tap in enumerate(taps):
        places = [i * spec.size + j if i < count else kept for i in range(LANES)]
        one = code.pick(f"<{kept} x float>", value, places, ZERO)
        code.store(FLOATS, one, code.at(tap, first, 4), WIDTH)


def _pack(code: Kernel, spec: Convolve, state: str, first: int, count: int, taps: list[str]) -> None:
    """Write the state of some channels, from each tap's inputs."""
    parts, lanes, kind = [], count, ""
    for tap in taps:
        value = numbers.load(code, code.at(tap, first, 4), 0, count, FP32)
        kind, short = numbers.rounded(code, value, count, spec.state)
        parts.append(short)
    one = kind.split()[-1].rstrip(">")
    while len(parts) > 1:
        parts += ["poison"] * (len(parts) % 2)
        parts = [
            code.pick(f"<{lanes} x {one}>", parts[i], range(2 * lanes), parts[i + 1]) for i in range(0, len(parts), 2)
        ]
        lanes *= 2
    places = [j * count + i for i in range(count) for j in range(spec.size)]
    value = code.pick(f"<{lanes} x {one}>", parts[0], places)
    size = spec.state.itemsize
    code.store(f"<{len(places)} x {one}>", value, code.at(state, first * spec.size, size), size)
