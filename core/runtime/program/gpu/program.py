"""A pass over a model on a GPU in the fast arithmetic: launches of Triton's kernels, with the bits of
`core.runtime.program.program` on a CPU.

Each layer's experts are computed by the step that transformers' hooks would call, which reads the router's choice: the
only wait for the device. All else is launched on the current stream, some twelve kernels a layer for a token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from core.errors import ModelError
from core.hf.discover import ExpertsSite
from core.memory.codec.fast.gpu.dense import DenseKernels, DenseProducts, Placed
from core.memory.codec.fast.products import CanonicalProducts
from core.memory.codec.kernels import Launcher
from core.memory.to_device import to_device
from core.runtime.batch import Batch
from core.runtime.program.attention import Attention
from core.runtime.program.bind import Layer, bind
from core.runtime.program.called import Experts, called
from core.runtime.program.feed_forward import Dense, Routed
from core.runtime.program.gpu.host_copies import HostCopies
from core.runtime.program.gpu.layer import Cached, LayerKernels
from core.runtime.program.mixer import Text
from core.runtime.program.program import Hits
from core.runtime.program.texts import texts_of
from core.runtime.program.weights import NormWeight, Weight
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
        if self.form.logits_cap:
            raise ModelError("on a GPU the fast arithmetic knows no bounds of logits")
        self._device, self._parts = device, self.form.parts
        self._kernels, self._dense = LayerKernels(launcher), DenseKernels(launcher)
        self._layers = [GpuLayer(layer, self._dense) for layer in self.form.layers]
        self._head = product_of(self._dense, self.form.head)
        self._ones = torch.ones(1, 1, device=device)

    def products(self) -> Iterator[CanonicalProducts]:
        """Of a CPU, whose ways are timed: none."""
        return iter(())

    @torch.inference_mode()
    def compute(self, batch: Batch, keep: int, experts: Experts, hits: Hits | None = None) -> torch.Tensor:
        """As `core.runtime.batch.compute` -> logits [keep * shares, V] in fp32."""
        with texts_of(self.form, self._parts, batch, keep, self._device) as (positions, texts):
            told = to_device([*batch.tokens, *positions], self._device, torch.int64)
            tokens, where = told.split(batch.size)
            return self._pass(texts, tokens, where, experts)

    def token(
        self, kv: SequenceKV, token: torch.Tensor, position: torch.Tensor, most: int, experts: Experts
    ) -> torch.Tensor:
        """The logits [1, V] of a pass over a token [1] at a position [1] below `most`, both int64 on the device, of
        which the host knows nothing: for graphs. The KV has it, and does not grow; its memory is allocated."""
        held = kv.memory.allocated(kv, self._parts, 0, self._device)
        return self._pass([Text(kv, held, 1, 1)], token, position, experts, most)

    def _pass(
        self, texts: Sequence[Text], tokens: torch.Tensor, where: torch.Tensor, experts: Experts, most: int = 0
    ) -> torch.Tensor:
        """The logits of tokens [T] at positions [T]; `most` positions of each text, 0 = those that the host knows."""
        x, delta = self._embedded(tokens), None
        for number, layer in enumerate(self._layers):
            delta = self._layer(number, layer, x, delta, where, texts, experts, most)
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
        number: int,
        layer: GpuLayer,
        x: torch.Tensor,
        delta: torch.Tensor | None,
        where: torch.Tensor,
        texts: Sequence[Text],
        experts: Experts,
        most: int,
    ) -> torch.Tensor:
        """[T, H] that is added to the residual stream x after the layer, which gets what was added before it, `delta`,
        and what the layer's attention adds."""
        of, factor = layer.form, self.form.layers[number - 1].factor if number else None
        normed = self._read(of.before, x, delta, factor)
        mixed = layer.o(self._attended(number, layer, normed, where, texts, most))
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

    def _attended(
        self, number: int, layer: GpuLayer, normed: torch.Tensor, where: torch.Tensor, texts: Sequence[Text], most: int
    ) -> torch.Tensor:
        """[T, query_heads * width] fp32."""
        of = layer.attention
        turned, attending = of.kernels()
        qkv = layer.qkv(normed)
        first = 0
        for across in of.across or ():
            part = qkv[:, first : first + across.form.width]
            self._norm(across, part, None, part)
            first += across.form.width
        q, out = (torch.empty(len(qkv), of.query_heads, of.width, device=qkv.device) for _ in range(2))
        size, begin = of.width * of.cache.itemsize, 0
        weights = (tensor_of(of.q_norm), tensor_of(of.k_norm)) if turned.norm is not None else (None, None)
        for text in texts:
            held, parts = text.held[number], of.written(text.rows)
            k, v = held.addresses
            cached = Cached(k, v, held.positions * size, size, held.positions * size, size)
            for first in parts:
                rows = min(parts.step, text.rows - first)
                some = slice(begin + first, begin + first + rows)
                angles = of.angles.cos, of.angles.sin
                self._kernels.rotate(turned, qkv[some], of.bias, weights, angles, where[some], q[some], cached)
                end = most or text.kv.length + first + rows
                self._kernels.attend(attending, q[some], cached, where[some], of.sinks, out[some], end, of.window)
            begin += text.rows
        return out.view(len(qkv), -1)

    def _routed(
        self, layer: GpuLayer, rest: Routed, x: torch.Tensor, normed: torch.Tensor, experts: Experts
    ) -> torch.Tensor:
        """What a router's experts, and the one that all tokens share, add."""
        assert layer.router is not None
        logits = layer.router(normed)
        routed = logits, *self._kernels.route(rest.route, logits, rest.correction)
        added = called(layer.form, rest, self.form.dtype, (x, normed), routed, experts)
        if rest.shared is None:
            return added
        assert layer.dense is not None
        shared, gate = self._feed(layer.dense, rest.shared, normed), layer.shared_gate
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
        return logits.mul_(form.logits_scale) if form.logits_scale != 1 else logits


class GpuLayer:
    """A decoder layer, and its products."""

    def __init__(self, form: Layer, kernels: DenseKernels) -> None:
        """Raises ModelError where it is of a kind that a GPU's kernels do not know."""
        of, rest = form.mixer, form.rest
        if not isinstance(of, Attention) or of.gates is not None:
            raise ModelError("on a GPU the fast arithmetic knows plain attention alone, without gates")
        self.form, self.attention = form, of
        self.qkv, self.o = product_of(kernels, of.q, of.k, of.v), product_of(kernels, of.o)
        self.router = self.shared_gate = None
        if isinstance(rest, Routed):
            if rest.route.groups is not None or rest.beside is not None:
                raise ModelError(
                    "on a GPU the fast arithmetic knows neither groups of experts nor experts beside a layer"
                )
            self.router = product_of(kernels, rest.router)
            self.shared_gate = None if rest.shared_gate is None else product_of(kernels, rest.shared_gate)
        dense = form.dense
        self.dense = (
            (product_of(kernels, dense.gate, dense.up), product_of(kernels, dense.down)) if dense is not None else None
        )


def product_of(kernels: DenseKernels, *weights: Weight) -> DenseProducts:
    """The product of rows by dense weights, one's results after the other's."""
    biases = [one.bias for one in weights if one.bias is not None]
    if biases and len(biases) < len(weights):
        raise ModelError("on a GPU the fast arithmetic knows no biases of some of a layer's products")
    bias = torch.cat(biases) if len(biases) > 1 else biases[0] if biases else None
    return kernels.by([Placed(one.products.matrix, one.slot) for one in weights], bias)


def tensor_of(norm: NormWeight | None) -> torch.Tensor | None:
    """A norm's weights, which it is bound to."""
    owner = norm.owner if norm is not None else None
    return owner.detach() if isinstance(owner, torch.Tensor) else None
