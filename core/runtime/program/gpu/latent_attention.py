"""Attention to latents on a GPU, as `core.runtime.program.latent_attention` has it on a CPU."""

from __future__ import annotations

import torch

from core.memory.codec.fast.gpu.dense import DenseKernels
from core.runtime.program.absorb import Absorb
from core.runtime.program.attend_block import Attend
from core.runtime.program.gpu.latent_kernels import Kept, LatentKernels
from core.runtime.program.gpu.layer import Cached, LayerKernels
from core.runtime.program.gpu.mixer import Rows, product_of, tensor_of
from core.runtime.program.latent import Latent
from core.runtime.program.latent_attention import AT_ONCE, LatentAttention


class GpuLatentAttention:
    """As `core.runtime.program.gpu.mixer.GpuMixer`."""

    def __init__(self, form: LatentAttention, dense: DenseKernels, kernels: LayerKernels) -> None:
        self._form, self._kernels, self._latents = form, kernels, LatentKernels(kernels)
        first = form.q if form.low is None else form.low[0]
        self.first, self._first = product_of(dense, first, form.kv), first.outputs
        self._q = None if form.low is None else product_of(dense, form.q)
        self._o = product_of(dense, form.o)
        self._begin = Latent(form.heads, form.keys, form.turned, form.norm.form, form.cache, form.interleaved)
        self._absorb = Absorb(form.expand.products.matrix, form.heads, form.keys, form.values, form.turned)
        sizes = form.width, form.width, form.cache, form.scale
        self._attend = Attend(form.heads, 1, *sizes, more=form.turned)

    def __call__(self, x: torch.Tensor, rows: Rows) -> torch.Tensor:
        of, given = self._form, self.first(x, rows.ready)
        q, kv = given[:, : self._first], given[:, self._first :]
        if of.low is not None and self._q is not None:
            takers = self._q.takers if len(x) == 1 else ()
            q = self._q(q, self._kernels.norm(of.low[1].form, tensor_of(of.low[1]), q, None, q, takers=takers))
        mixed = torch.empty(len(x), of.heads * of.values, device=x.device)
        begin = 0
        for text in rows.texts:
            latents, keys = text.held[rows.number].addresses
            kept = Kept(latents, keys, of.width * of.cache.itemsize, of.turned * of.cache.itemsize)
            for first in range(0, text.rows, AT_ONCE):
                end = min(first + AT_ONCE, text.rows)
                some, most = slice(begin + first, begin + end), rows.most or text.kv.length + end
                self._some(q[some], kv[some], rows.positions[some], kept, most, mixed[some])
            begin += text.rows
        return self._o(mixed, end=rows.end)

    def _some(
        self, q: torch.Tensor, kv: torch.Tensor, positions: torch.Tensor, kept: Kept, most: int, out: torch.Tensor
    ) -> None:
        """out [T, heads * values] of some rows of a sequence."""
        of, count, device = self._form, len(q), q.device
        absorbed = torch.empty(count, of.heads, of.width + of.turned, device=device)
        summed = torch.empty(count, of.heads, of.width, device=device)
        angles = of.angles.cos, of.angles.sin
        self._latents.begin(self._begin, q, kv, tensor_of(of.norm), angles, positions, kept, absorbed)
        self._latents.queries(self._absorb, of.expand.slot, q, absorbed)
        cached = Cached(kept.latents, kept.latents, 0, kept.latent_row, 0, kept.latent_row, kept.keys, kept.key_row)
        self._kernels.attend(self._attend, absorbed, cached, positions, None, summed, most)
        self._latents.values(self._absorb, of.expand.slot, summed, out)
