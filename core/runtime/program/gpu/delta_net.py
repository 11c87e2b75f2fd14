"""Gated delta nets on a GPU, as `core.runtime.program.delta_net` has them on a CPU."""

from __future__ import annotations

from dataclasses import replace

import torch

from core.memory.codec.fast.gpu.dense import DenseKernels
from core.runtime.program.delta_net import DeltaNet
from core.runtime.program.gpu.delta_kernels import DeltaKernels, Gates, Taken
from core.runtime.program.gpu.layer import LayerKernels
from core.runtime.program.gpu.mixer import Rows, product_of


class GpuDeltaNet:
    """As `core.runtime.program.gpu.mixer.GpuMixer`."""

    def __init__(self, form: DeltaNet, dense: DenseKernels, kernels: LayerKernels) -> None:
        self._form, self._kernels, self._delta = form, kernels, DeltaKernels(kernels)
        self.first, self._out = product_of(dense, *form.given), product_of(dense, form.out)
        self._gates = Gates(form.columns.a, form.columns.b, form.a_log, form.dt_bias)

    def __call__(self, x: torch.Tensor, rows: Rows) -> torch.Tensor:
        of, given, holds = self._form, self.first(x, rows.ready), rows.later is not None
        convolve, rule, columns = replace(of.convolve, holds=holds), replace(of.rule, holds=holds), of.columns.channels
        mixed = torch.empty(len(x), of.rule.channels, device=x.device)
        heads = torch.empty(len(x), of.out.inputs, device=x.device)
        begin, found = 0, list[tuple[slice, int, int]]()
        for text in rows.texts:
            inputs, matrices = text.held[rows.number].addresses
            found.append((slice(begin, begin + text.rows), inputs, matrices))
            begin += text.rows
        for some, inputs, _ in found:
            self._delta.convolve(convolve, given[some], columns, of.weight, of.bias, inputs, mixed[some])
        taken = self._delta.inputs(of.inputs, mixed, given, self._gates)
        for some, _, matrices in found:
            self._delta.rule(rule, taken.some(some), matrices, heads[some], some.stop - some.start)
        if rows.later is not None:
            ((_, inputs, matrices),) = found
            rows.later.append(lambda count: self._settle(given, taken, heads, (inputs, matrices), count))
        return self._out(self._kernels.gate(of.gated, heads, given, of.columns.gates, of.norm), end=rows.end)

    def _settle(
        self, given: torch.Tensor, taken: Taken, heads: torch.Tensor, states: tuple[int, int], count: int
    ) -> None:
        """Bring the states, which were left as they are, to where they are after `count` rows."""
        of, (inputs, matrices) = self._form, states
        self._delta.keep(of.convolve, given, of.columns.channels, inputs, count)
        self._delta.rule(of.rule, taken, matrices, heads, count)
