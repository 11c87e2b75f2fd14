"""What a gated delta net computes between its products, on a GPU: launches of the kernels of convolve.py and
delta_rule.py, on the current stream."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from core.runtime.program.convolve import Convolve
from core.runtime.program.delta_inputs import DeltaInputs
from core.runtime.program.delta_rule import DeltaRule
from core.runtime.program.gpu.layer import LayerKernels, power_of_2

CHANNELS = 128  # of a program of the convolution
HEADS = 32  # whose decays and rates a program computes
SLICE = 32  # columns of a state of a program: one of each thread of a warp


class Taken(NamedTuple):
    """What the rule takes of rows, fp32: their queries, keys and values [T, channels], of which the first two are in
    `normed` [T, 2 * key_heads * key_width] as well; the products of these [T, key_heads]; decays and rates [T,
    value_heads]."""

    mixed: torch.Tensor
    normed: torch.Tensor
    products: torch.Tensor
    decays: torch.Tensor
    rates: torch.Tensor

    def some(self, rows: slice) -> Taken:
        return Taken(*[one[rows] for one in self])


class Gates(NamedTuple):
    """Where a and b of each value head are in a row of what is given, int64, and what they are added to or by."""

    a: torch.Tensor
    b: torch.Tensor
    a_log: torch.Tensor
    dt_bias: torch.Tensor


class DeltaKernels:
    """What the gated delta nets of a model share. Raises ImportError."""

    def __init__(self, kernels: LayerKernels) -> None:
        from core.memory.codec.fast.gpu.form import NUMBERS
        from core.runtime.program.gpu import convolve, delta_rule

        self._numbers, self._start, self._convolve, self._rule = NUMBERS, kernels.start, convolve, delta_rule

    def convolve(
        self,
        spec: Convolve,
        x: torch.Tensor,
        columns: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        state: int,
        out: torch.Tensor,
    ) -> None:
        """From rows x [T, n] of a sequence to out [T, channels], both fp32. Strip i of channels begins at columns[i],
        int64; `state`: the address of its last inputs, which is brought up to date unless `spec.holds`."""
        constants, rows = self._of(spec), len(x)
        start = self._start(self._convolve.convolve, {**constants, "KEEP": rows == 1 and not spec.holds}, warps=4)
        start[-(-spec.channels // CHANNELS), rows](x, columns, weight, bias, state, out, x.stride(0))
        if rows > 1 and not spec.holds:
            self.keep(spec, x, columns, state, rows)

    def keep(self, spec: Convolve, x: torch.Tensor, columns: torch.Tensor, state: int, rows: int) -> None:
        """Bring the state up to date after the first `rows` of x."""
        start = self._start(self._convolve.keep_inputs, self._of(spec), warps=4)
        start[-(-spec.channels // CHANNELS), 1](x, columns, state, rows, x.stride(0))

    def inputs(self, spec: DeltaInputs, mixed: torch.Tensor, given: torch.Tensor, gates: Gates) -> Taken:
        """Of queries, keys and values mixed [T, spec.stride], and a and b in given [T, n], all fp32."""
        rows, heads = len(mixed), (spec.key_heads, spec.value_heads, spec.value_heads)
        widths = 2 * spec.key_heads * spec.key_width, *heads
        normed, *others = (torch.empty(rows, width, device=mixed.device) for width in widths)
        constants = {"S": spec, "BY": 1 / math.sqrt(spec.key_width), "BLOCK": HEADS}
        start = self._start(self._rule.inputs, constants)
        programs = spec.key_heads + -(-spec.value_heads // HEADS), rows
        start[programs](mixed, given, *gates, normed, *others, given.stride(0))
        return Taken(mixed, normed, *others)

    def rule(self, spec: DeltaRule, taken: Taken, state: int, out: torch.Tensor, rows: int) -> None:
        """out [T, value_heads * value_width] fp32 of the first `rows`; the states at an address are brought up to date
        unless `spec.holds`."""
        kept = None
        if spec.holds:
            kept = torch.empty(spec.value_heads, spec.key_width, spec.value_width, device=out.device)
        start = self._start(self._rule.rule, {"S": spec, "SLICE": SLICE})
        mixed, normed, *others = taken
        into = state if kept is None else kept.data_ptr()
        start[-(-spec.value_width // SLICE), spec.value_heads](normed, mixed, *others, state, into, out, rows)

    def _of(self, spec: Convolve) -> dict[str, object]:
        size = power_of_2(spec.size)
        return {"STATE": self._numbers[spec.state], "S": spec, "BLOCK": CHANNELS, "SIZE": size}
