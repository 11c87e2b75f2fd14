"""Grouped-query attention on a GPU, as `core.runtime.program.attention` has it on a CPU."""

from __future__ import annotations

import torch

from core.errors import ModelError
from core.memory.codec.fast.gpu.dense import DenseKernels
from core.runtime.program.attention import Attention
from core.runtime.program.gpu.layer import Cached, LayerKernels
from core.runtime.program.gpu.mixer import Rows, product_of, tensor_of


class GpuAttention:
    """As `core.runtime.program.gpu.mixer.GpuMixer`."""

    def __init__(self, form: Attention, dense: DenseKernels, kernels: LayerKernels) -> None:
        """Raises ModelError for values that are not stored as keys are."""
        if form.values != form.width or form.value_scale != 1:
            raise ModelError("on a GPU, heads of values of another width than keys, or scaled ones, are not known")
        self._form, self._kernels = form, kernels
        self.first, self._o = product_of(dense, form.q, form.k, form.v), product_of(dense, form.o)
        self._gates = [product_of(dense, one) for one in form.own_gates]

    def __call__(self, x: torch.Tensor, rows: Rows) -> torch.Tensor:
        of, qkv = self._form, self.first(x, rows.ready)
        first = 0
        for across in of.across or ():
            part = qkv[:, first : first + across.form.width]
            self._kernels.norm(across.form, tensor_of(across), part, None, part)
            first += across.form.width
        mixed = self._attended(qkv, rows)
        gates = self._gates[0](x, rows.ready) if self._gates else qkv
        if of.gates is not None:
            mixed = self._kernels.gate(of.gates.form, mixed, gates, of.gates.columns, None)
        return self._o(mixed, end=rows.end)

    def _attended(self, qkv: torch.Tensor, rows: Rows) -> torch.Tensor:
        """[T, query_heads * width] fp32."""
        of, positions = self._form, rows.positions
        turned, attending = of.kernels()
        q, out = (torch.empty(len(qkv), of.query_heads, of.width, device=qkv.device) for _ in range(2))
        size, begin = of.width * of.cache.itemsize, 0
        weights = (tensor_of(of.q_norm), tensor_of(of.k_norm)) if turned.norm is not None else (None, None)
        angles = of.angles.cos, of.angles.sin
        for text in rows.texts:
            held, parts = text.held[rows.number], of.written(text.rows)
            k, v = held.addresses
            cached = Cached(k, v, held.positions * size, size, held.positions * size, size)
            for first in parts:
                count = min(parts.step, text.rows - first)
                some = slice(begin + first, begin + first + count)
                self._kernels.rotate(turned, qkv[some], of.bias, weights, angles, positions[some], q[some], cached)
                end = rows.most or text.kv.length + first + count
                self._kernels.attend(attending, q[some], cached, positions[some], of.sinks, out[some], end, of.window)
            begin += text.rows
        return out.view(len(qkv), -1)
