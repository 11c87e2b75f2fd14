"""A pass over a model on a GPU in the fast arithmetic: launches of Triton's kernels, with the bits of
`core.runtime.program.program` on a CPU.

Each layer's experts are computed by the step that transformers' hooks would call, which reads the router's choice: the
only wait for the device. All else is launched on the current stream, some nine kernels a layer for a token.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from core.hf.discover import ExpertsSite
from core.memory.codec.fast.gpu.dense import NOTHING, DenseKernels, DenseProducts, Ready
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
from core.runtime.program.gpu.experts import GpuExperts
from core.runtime.program.gpu.host_copies import HostCopies
from core.runtime.program.gpu.latent_attention import GpuLatentAttention
from core.runtime.program.gpu.layer import LayerKernels, Takers
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
        self,
        model: Any,
        sites: Sequence[ExpertsSite],
        context: int,
        device: torch.device,
        launcher: Launcher,
        experts: Sequence[GpuExperts],
    ) -> None:
        """`experts`: those of each MoE layer. Raises ModelError, with the reason, where the model is not known."""
        self.form = bind(model, sites, context, HostCopies(device))
        self._device, self._parts = device, self.form.parts
        self._kernels, self._dense = LayerKernels(launcher), DenseKernels(launcher)
        self._layers = [GpuLayer(layer, self._dense, self._kernels, experts) for layer in self.form.layers]
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
        one, rest = len(x) == 1, of.rest
        given, ready = self._read(of.before, x, delta, factor, layer.mixer.first.takers if one else ())
        if one and of.after is not None and of.mixed is None:  # a row is normed by the product before it
            normed, sizes = torch.empty_like(x), (self.form.residual_scale, layer.takers)
            end, after = self._kernels.then_norm(of.after.form, tensor_of(of.after), x, normed, *sizes)
            layer.mixer(given, rows._replace(ready=ready, end=end))
        else:
            mixed = layer.mixer(given, rows._replace(ready=ready))
            if of.mixed is not None:
                self._norm(of.mixed, mixed, None, mixed)
            normed, after = self._read(of.after, x, mixed, takers=layer.takers if one else ())
        if isinstance(rest, Dense):
            assert layer.dense is not None
            added = self._feed(layer.dense, rest, normed, after)
        else:
            added = self._routed(layer, rest, x, (normed, after), experts)
        if of.added is not None:
            self._norm(of.added, added, None, added)
        return added

    def _routed(
        self,
        layer: GpuLayer,
        rest: Routed,
        x: torch.Tensor,
        states: tuple[torch.Tensor, Ready],
        experts: Experts,
    ) -> torch.Tensor:
        """What a router's experts, and the one that all tokens share, add; `states`: normed, and what is prepared of
        them."""
        assert layer.router is not None and layer.experts is not None
        (normed, ready), beside, one = states, rest.beside, len(x) == 1
        read, given = states, states
        if beside is not None:
            read = self._read(beside.router, x, None, takers=layer.router.takers if one else ())
            given = self._read(beside.experts, x, None, takers=layer.experts.takers if one else ())
        rule, bias, scales = rest.route, rest.correction, beside.scales if beside is not None else None
        if one:
            end, *chosen = self._kernels.then_route(rule, bias, scales, x.device)
            logits = layer.router(*read, end)
        else:
            logits = layer.router(read[0])
            chosen = [*self._kernels.route(rule, logits, bias, scales)]
        with layer.experts.given(*given, changed=bool(rest.site.module._forward_pre_hooks)):
            routed = logits, chosen[0], chosen[1]
            added = called(layer.form, rest, self.form.dtype, (x, given[0]), routed, experts)
        if rest.shared is None:
            return added
        assert layer.dense is not None
        shared, gate = self._feed(layer.dense, rest.shared, normed, ready), layer.shared_gate
        if beside is not None:
            self._norm(beside.after_experts, added, None, added)
            self._norm(beside.after_shared, shared, None, shared)
        return self._sum(added, shared, None if gate is None else gate(normed, ready))

    def _feed(
        self, products: tuple[DenseProducts, DenseProducts], of: Dense, normed: torch.Tensor, ready: Ready
    ) -> torch.Tensor:
        """[T, H] of a dense layer."""
        gates, down = products
        return down(self._kernels.activate(of.form, gates(normed, ready)))

    def _read(
        self,
        of: NormWeight | None,
        x: torch.Tensor,
        delta: torch.Tensor | None,
        factor: torch.Tensor | None = None,
        takers: Takers = (),
    ) -> tuple[torch.Tensor, Ready]:
        """Add to the residual stream -> it, normed if there is a norm, and what `takers` take of its only row then."""
        if of is None:
            if delta is not None:
                x.copy_(self._sum(delta, x))
            return self._sum(x), NOTHING
        out = torch.empty_like(x)
        return out, self._norm(of, x, delta, out, self.form.residual_scale, factor, takers)

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
        takers: Takers = (),
    ) -> Ready:
        return self._kernels.norm(of.form, tensor_of(of), x, delta, out, scale, factor, takers)

    def _logits(self, x: torch.Tensor, delta: torch.Tensor | None, texts: Sequence[Text]) -> torch.Tensor:
        """[kept, V] fp32 of the last rows of each text."""
        form, end, normed, ready = self.form, 0, list[torch.Tensor](), NOTHING
        takers = self._head.takers if len(texts) == texts[0].kept == 1 else ()
        assert delta is not None
        for text in texts:
            end += text.rows
            some = slice(end - text.kept, end)
            normed.append(torch.empty_like(x[some]))
            factor = form.layers[-1].factor
            ready = self._norm(form.norm, x[some], delta[some], normed[-1], form.residual_scale, factor, takers)
        logits = self._head(normed[0] if len(normed) == 1 else torch.cat(normed), ready)
        if form.logits_scale != 1:
            logits.mul_(form.logits_scale)
        if form.logits_cap:
            self._kernels.cap(logits, form.logits_cap)
        return logits


class GpuLayer:
    """A decoder layer: its mixer, its products and experts, and `takers` of what is normed before these."""

    def __init__(self, form: Layer, dense: DenseKernels, kernels: LayerKernels, experts: Sequence[GpuExperts]) -> None:
        self.form, rest = form, form.rest
        self.mixer = mixer_of(form.mixer, dense, kernels)
        self.router = self.shared_gate = self.experts = None
        if isinstance(rest, Routed):
            self.router, self.experts = product_of(dense, rest.router), experts[rest.site.index]
            self.shared_gate = None if rest.shared_gate is None else product_of(dense, rest.shared_gate)
        of = form.dense
        self.dense = (product_of(dense, *of.first), product_of(dense, of.down)) if of is not None else None
        beside = isinstance(rest, Routed) and rest.beside is not None
        each = [self.router, self.experts] if not beside else []
        each += [self.shared_gate, None if self.dense is None else self.dense[0]]
        forms = [form for one in each if one is not None for form in one.takers]
        self.takers = tuple({form.of_x: form for form in forms}.values())


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
