"""A pass over a model on a GPU in the fast arithmetic: launches of Triton's kernels, with the bits of
`core.runtime.program.program` on a CPU.

Each layer's experts are computed by the step that transformers' hooks would call, which reads the router's choice: the
only wait for the device. All else is launched on the current stream, some twelve kernels a layer for a token.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from core.hf.discover import ExpertsSite
from core.memory.codec.fast.gpu.dense import DenseKernels, DenseProducts
from core.memory.codec.fast.products import CanonicalProducts
from core.memory.codec.kernels import Launcher
from core.memory.to_device import to_device
from core.runtime.batch import Batch
from core.runtime.kv_cache import KVCache
from core.runtime.program.attention import Attention
from core.runtime.program.bind import Layer, bind
from core.runtime.program.called import Experts, called
from core.runtime.program.delta_net import DeltaNet
from core.runtime.program.feed_forward import Dense, Routed
from core.runtime.program.gpu.attention import GpuAttention
from core.runtime.program.gpu.delta_net import GpuDeltaNet
from core.runtime.program.gpu.host_copies import HostCopies
from core.runtime.program.gpu.latent_attention import GpuLatentAttention
from core.runtime.program.gpu.layer import LayerKernels
from core.runtime.program.gpu.mixer import GpuMixer, Rows, product_of, tensor_of
from core.runtime.program.latent_attention import LatentAttention
from core.runtime.program.mixer import Mixer, Text
from core.runtime.program.program import Hits
from core.runtime.program.texts import texts_of
from core.runtime.program.weights import NormWeight
from core.runtime.sequence_kv import SequenceKV


class GpuProgram:
    """As `core.runtime.program.program.Program`. One pass at a time."""

    asks = False  # other routers about a layer's state
    built_s = 0.0  # seconds that passes took to be built

    def __init__(
        self, model: Any, sites: Sequence[ExpertsSite], context: int, device: torch.device, launcher: Launcher
    ) -> None:
        """Raises ModelError, with the reason, where the model is not known."""
        self.form = bind(model, sites, context, HostCopies(device))
        self._device, self._parts = device, self.form.parts
        self._kernels, self._dense = LayerKernels(launcher), DenseKernels(launcher)
        self._layers = [GpuLayer(layer, self._dense, self._kernels) for layer in self.form.layers]
        self._head = product_of(self._dense, self.form.head)
        self._ones = torch.ones(1, 1, device=device)
        self._holding: KVCache | None = None  # whose states the latest pass has left as they were

    def products(self) -> Iterator[CanonicalProducts]:
        """Of a CPU, whose ways are timed: none."""
        return iter(())

    @torch.inference_mode()
    def compute(self, batch: Batch, keep: int, experts: Experts, hits: Hits | None = None) -> torch.Tensor:
        """As `core.runtime.batch.compute` -> logits [keep * shares, V] in fp32. Of a decode pass with logits of several
        rows, some may be taken back (`KVCache.take_back`)."""
        if self._holding is not None:
            self._holding.settle()
            self._holding = None
        with texts_of(self.form, self._parts, batch, keep, self._device) as (positions, texts):
            later = list[Callable[[int], None]]() if self._holds(batch, keep) else None
            told = to_device([*batch.tokens, *positions], self._device, torch.int64)
            tokens, where = told.split(batch.size)
            logits = self._pass(texts, tokens, where, experts, later=later)
        if later:
            self._holding = texts[0].kv.memory
            self._holding.hold(len(batch.tokens), functools.partial(_settle, later))
        return logits

    @staticmethod
    def _holds(batch: Batch, keep: int) -> bool:
        """Whether some of its rows may be taken back, so that states stay as they are."""
        return batch.phase == "decode" and keep > 1 and len(batch.shares) == 1

    def token(
        self, kv: SequenceKV, token: torch.Tensor, position: torch.Tensor, most: int, experts: Experts
    ) -> torch.Tensor:
        """The logits [1, V] of a pass over a token [1] at a position [1] below `most`, both int64 on the device, of
        which the host knows nothing: for graphs. The KV has it, and does not grow; its memory is allocated."""
        held = kv.memory.allocated(kv, self._parts, 0, self._device)
        return self._pass([Text(kv, held, 1, 1)], token, position, experts, most)

    def _pass(
        self,
        texts: Sequence[Text],
        tokens: torch.Tensor,
        where: torch.Tensor,
        experts: Experts,
        most: int = 0,
        later: list[Callable[[int], None]] | None = None,
    ) -> torch.Tensor:
        """The logits of tokens [T] at positions [T]; `most` positions of each text, 0 = those that the host knows;
        `later`: as `Rows` has it."""
        x, delta = self._embedded(tokens), None
        for number, layer in enumerate(self._layers):
            delta = self._layer(layer, x, delta, Rows(number, texts, where, most, later), experts)
        return self._logits(x, delta, texts)

    def _embedded(self, tokens: torch.Tensor) -> torch.Tensor:
        """[T, H] fp32."""
        form, weight = self.form, self.form.embedding.weight
        assert isinstance(weight, torch.Tensor)
        if form.embedding._forward_hooks or form.embedding._forward_pre_hooks:
            x: torch.Tensor = form.embedding(tokens[None])[0].float()
        else:
            x = weight.index_select(0, tokens).float()
        return x.mul_(form.embedding_scale) if form.embedding_scale != 1 else x

    def _layer(
        self,
        layer: GpuLayer,
        x: torch.Tensor,
        delta: torch.Tensor | None,
        rows: Rows,
        experts: Experts,
    ) -> torch.Tensor:
        """[T, H] that is added to the residual stream x after the layer, which gets what was added before it, `delta`,
        and what the layer's mixer adds."""
        of, factor = layer.form, self.form.layers[rows.number - 1].factor if rows.number else None
        normed = self._read(of.before, x, delta, factor)
        mixed = layer.mixer(normed, rows)
        if of.mixed is not None:
            self._norm(of.mixed, mixed, None, mixed)
        normed = self._read(of.after, x, mixed)
        rest = of.rest
        if isinstance(rest, Dense):
            assert layer.dense is not None
            added = self._feed(layer.dense, rest, normed)
        else:
            added = self._routed(layer, rest, x, normed, experts)
        if of.added is not None:
            self._norm(of.added, added, None, added)
        return added

    def _routed(
        self, layer: GpuLayer, rest: Routed, x: torch.Tensor, normed: torch.Tensor, experts: Experts
    ) -> torch.Tensor:
        """What a router's experts, and the one that all tokens share, add."""
        assert layer.router is not None
        beside, states, given = rest.beside, normed, normed
        if beside is not None:
            states, given = self._read(beside.router, x, None), self._read(beside.experts, x, None)
        logits = layer.router(states)
        scales = beside.scales if beside is not None else None
        routed = logits, *self._kernels.route(rest.route, logits, rest.correction, scales)
        added = called(layer.form, rest, self.form.dtype, (x, given), routed, experts)
        if rest.shared is None:
            return added
        assert layer.dense is not None
        shared, gate = self._feed(layer.dense, rest.shared, normed), layer.shared_gate
        if beside is not None:
            self._norm(beside.after_experts, added, None, added)
            self._norm(beside.after_shared, shared, None, shared)
        return self._sum(added, shared, None if gate is None else gate(normed))

    def _feed(self, products: tuple[DenseProducts, DenseProducts], of: Dense, normed: torch.Tensor) -> torch.Tensor:
        """[T, H] of a dense layer."""
        gates, down = products
        return down(self._kernels.activate(of.form, gates(normed)))

    def _read(
        self, of: NormWeight | None, x: torch.Tensor, delta: torch.Tensor | None, factor: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Add to the residual stream -> it, normed if there is a norm."""
        if of is None:
            if delta is not None:
                x.copy_(self._sum(delta, x))
            return self._sum(x)
        out = torch.empty_like(x)
        self._norm(of, x, delta, out, self.form.residual_scale, factor)
        return out

    def _sum(self, x: torch.Tensor, more: torch.Tensor | None = None, gate: torch.Tensor | None = None) -> torch.Tensor:
        """[T, H]: x, plus `more`, or that times the sigmoid of its gate [T, 1]."""
        count = len(x)
        rows, ones = torch.arange(count, device=x.device)[:, None], self._ones.expand(count, 1).contiguous()
        return self._kernels.combine(x, rows, ones, more, gate)

    def _norm(
        self,
        of: NormWeight,
        x: torch.Tensor,
        delta: torch.Tensor | None,
        out: torch.Tensor,
        scale: float = 1.0,
        factor: torch.Tensor | None = None,
    ) -> None:
        self._kernels.norm(of.form, tensor_of(of), x, delta, out, scale, factor)

    def _logits(self, x: torch.Tensor, delta: torch.Tensor | None, texts: Sequence[Text]) -> torch.Tensor:
        """[kept, V] fp32 of the last rows of each text."""
        form, end, normed = self.form, 0, list[torch.Tensor]()
        assert delta is not None
        for text in texts:
            end += text.rows
            some = slice(end - text.kept, end)
            normed.append(torch.empty_like(x[some]))
            factor = form.layers[-1].factor
            self._norm(form.norm, x[some], delta[some], normed[-1], form.residual_scale, factor)
        logits = self._head(normed[0] if len(normed) == 1 else torch.cat(normed))
        if form.logits_scale != 1:
            logits.mul_(form.logits_scale)
        if form.logits_cap:
            self._kernels.cap(logits, form.logits_cap)
        return logits


class GpuLayer:
    """A decoder layer: its mixer, and its products."""

    def __init__(self, form: Layer, dense: DenseKernels, kernels: LayerKernels) -> None:
        self.form, rest = form, form.rest
        self.mixer = mixer_of(form.mixer, dense, kernels)
        self.router = self.shared_gate = None
        if isinstance(rest, Routed):
            self.router = product_of(dense, rest.router)
            self.shared_gate = None if rest.shared_gate is None else product_of(dense, rest.shared_gate)
        of = form.dense
        self.dense = (product_of(dense, *of.first), product_of(dense, of.down)) if of is not None else None


def mixer_of(form: Mixer, dense: DenseKernels, kernels: LayerKernels) -> GpuMixer:
    """The mixer of a layer."""
    if isinstance(form, Attention):
        return GpuAttention(form, dense, kernels)
    if isinstance(form, DeltaNet):
        return GpuDeltaNet(form, dense, kernels)
    assert isinstance(form, LatentAttention)
    return GpuLatentAttention(form, dense, kernels)


@torch.inference_mode()
def _settle(later: Sequence[Callable[[int], None]], rows: int) -> None:
    """Bring all states to where they are after the first so many rows."""
    for settle in later:
        settle(rows)
