"""A pass over a model on a CPU in the fast arithmetic: everything but the experts of a layer is one native call.

The experts are computed by the step that transformers' hooks would call, with the same arguments, so that routing,
recording, policies, prefetch and lossy modes are the same in both arithmetics. Hooks on embeddings, on the norm before
a router, on routers and on experts are called as in a pass of transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from core.hf.discover import ExpertsSite
from core.memory.codec.fast import plain
from core.memory.codec.fast.products import numbered
from core.memory.codec.fast.steps import Steps, Work, named
from core.memory.codec.native.threads import acquire_team
from core.runtime.batch import Batch
from core.runtime.kv_cache import SequenceKV
from core.runtime.program import attend, rms, rotate, route
from core.runtime.program.bind import FP32, Attention, Layer, NormWeight, Weight, bind

ALONE = 1 << 30  # units that one thread computes: others would join too late
FEW = 8  # rows up to which norms and routing are computed by one thread

Experts = Callable[[ExpertsSite, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Text(NamedTuple):
    """Some rows of a pass: the next tokens of one sequence."""

    kv: SequenceKV
    rows: int


class Program:
    """For one model. One pass at a time."""

    def __init__(self, model: Any, sites: Sequence[ExpertsSite], context: int) -> None:
        """Raises ModelError, with the reason, where the model is not known."""
        self.form = bind(model, sites, context)
        self._steps = Steps()
        self._buffers: dict[str, torch.Tensor] = {}

    @torch.inference_mode()
    def compute(self, batch: Batch, keep: int, experts: Experts) -> torch.Tensor:
        """As `core.runtime.batch.compute` -> logits [keep * shares, V] in fp32."""
        form, tokens, first = self.form, batch.tokens, self.form.layers[0].attention
        texts = [Text(share.kv, len(share.tokens)) for share in batch.shares if share.kv is not None]
        assert len(texts) == len(batch.shares), "there is nothing that the tokens follow"
        for kv, _ in texts:
            kv.whole = False
            kv.memory.allocate(kv, first.heads, first.width, form.dtype)
        positions = torch.cat([torch.arange(kv.length, kv.length + count) for kv, count in texts])
        x = self._buffer("x", len(tokens), form.hidden)
        x.copy_(form.embedding(torch.tensor([tokens]))[0])
        delta: torch.Tensor | None = None
        for number, layer in enumerate(form.layers):
            delta = self._layer(number, layer, texts, positions, x, delta, experts)
        assert delta is not None
        logits = self._logits(texts, x, delta, keep)
        for kv, count in texts:
            kv.memory.grow(kv, count)
            kv.whole = True
        return logits

    # ------------------------------------------------------------------ a layer

    def _layer(
        self,
        number: int,
        layer: Layer,
        texts: Sequence[Text],
        positions: torch.Tensor,
        x: torch.Tensor,
        delta: torch.Tensor | None,
        experts: Experts,
    ) -> torch.Tensor:
        """What the experts of a layer add to the residual stream x [T, H], which the other parts are added to."""
        rows, router, steps, team = len(x), layer.router, self._steps, acquire_team()
        normed = self._buffer("normed", rows, self.form.hidden)
        logits = torch.empty(rows, router.outputs)
        ids, weights = torch.empty(rows, layer.route.chosen, dtype=torch.int64), torch.empty(rows, layer.route.chosen)
        try:
            steps.add(self._norm(layer.before, x, delta, normed))
            attended = self._attention(number, layer.attention, texts, positions, normed)
            steps.add(self._norm(layer.after, x, attended, normed))
            self._product(router, normed, logits)
            at = {"logits": logits.data_ptr(), "ids": ids.data_ptr(), "weights": weights.data_ptr()}
            steps.add(Work(route.kernel(layer.route), named(route.FIELDS, **at), rows, some(rows)))
            steps.run(team)
        finally:
            team.release()
            steps.clear()
        hidden = normed[:rows]
        site, seen = layer.site, None
        if layer.after_module._forward_pre_hooks:
            _before(layer.after_module, (x.to(self.form.dtype),))
        if site.router._forward_hooks or site.router._forward_pre_hooks:
            seen = hidden.to(self.form.dtype)
            _before(site.router, (seen,))
            _after(site.router, (seen,), (logits.to(self.form.dtype), weights.to(self.form.dtype), ids))
        module = site.module
        if module._forward_hooks or module._forward_pre_hooks:
            _before(module, (hidden, ids, weights))
        output = experts(site, hidden, ids, weights)
        if module._forward_hooks:
            _after(module, (hidden, ids, weights), output)
        return output

    def _attention(
        self, number: int, form: Attention, texts: Sequence[Text], positions: torch.Tensor, normed: torch.Tensor
    ) -> torch.Tensor:
        """What attention adds to the residual stream; its steps are added."""
        rows, width = len(positions), form.width
        outputs = (form.query_heads + 2 * form.heads) * width
        qkv, q = self._buffer("qkv", rows, outputs), self._buffer("q", rows, form.query_heads * width)
        mixed, out = self._buffer("mixed", rows, form.query_heads * width), self._buffer("out", rows, self.form.hidden)
        first, kept = 0, ""
        for weight in (form.q, form.k, form.v):
            kept = self._product(weight, normed, qkv[:, first:], kept)
            first += weight.outputs
        norm = form.q_norm.form if form.q_norm is not None else None
        turned = rotate.Rotate(
            form.query_heads,
            form.heads,
            width,
            2 * self.form.cos.shape[1],
            self.form.dtype,
            norm,
            form.bias.dtype if form.bias is not None else None,
        )
        attending = attend.Attend(form.query_heads, form.heads, width, width, self.form.dtype, form.scale)
        bias = form.bias.data_ptr() if form.bias is not None else 0
        both = {"q_weight": form.q_norm, "k_weight": form.k_norm}
        norms = {name: one.at for name, one in both.items() if one is not None}
        begin = 0
        for kv, count in texts:
            memory, start = kv.memory, kv.length
            k, v = memory.addresses()[2 * number : 2 * number + 2]
            row = width * self.form.dtype.itemsize
            at = {"k": k, "v": v, "positions": _row(positions, begin), "q": _row(q, begin)}
            at |= {f"{one}_head_stride": memory.context * row for one in "kv"}
            at |= {f"{one}_row_stride": row for one in "kv"}
            angles = {"cos": _row(self.form.cos, start), "sin": _row(self.form.sin, start)}
            given = named(rotate.FIELDS, qkv=_row(qkv, begin), bias=bias, **norms, **angles, **at)
            self._steps.add(Work(rotate.kernel(turned), given, count * form.heads, some(count * form.heads, 16)))
            given = named(attend.FIELDS, out=_row(mixed, begin), rows=count, window=attend.NO_WINDOW, **at)
            self._steps.add(Work(attend.kernel(attending), given, count * form.heads, 1))
            begin += count
        self._product(form.o, mixed, out)
        return out

    # ------------------------------------------------------------------ steps

    def _norm(self, norm: NormWeight, x: torch.Tensor, delta: torch.Tensor | None, out: torch.Tensor) -> Work:
        """x += delta, and its norm."""
        kernel = rms.kernel(rms.Rms(norm.form, FP32, adds=delta is not None))
        at = delta.data_ptr() if delta is not None else 0
        strides = {"x_stride": x.stride(0) * 4, "out_stride": out.stride(0) * 4}
        given = named(rms.FIELDS, x=x.data_ptr(), delta=at, weight=norm.at, out=out.data_ptr(), **strides)
        return Work(kernel, given, len(x), some(len(x)))

    def _product(self, weight: Weight, x: torch.Tensor, out: torch.Tensor, kept: str = "") -> str:
        """out = x times a weight; `kept` names rows that were prepared of the same x before. Returns the name now."""
        products, rows = weight.products, len(x)
        one = products.matrix
        if not one.bits and plain.padded(one.inputs) == x.stride(0):
            prepared, name = x.data_ptr(), "plain"
        else:
            name = f"prepared {one.bits} {min(one.group, 64)} {one.table} {one.inputs}"
            memory = self._buffer(name, rows, -(-products.prepared_bytes // 64) * 16)
            prepared = memory.data_ptr()
            if name != kept:
                self._steps.add(products.prepare(x.data_ptr(), x.stride(0) * 4, rows, prepared))
        given = prepared, numbered(0), rows, out.data_ptr(), out.stride(0) * 4
        self._steps.add(products.multiply(self._steps, given, (weight.slot,), FP32))
        return name

    def _logits(self, texts: Sequence[Text], x: torch.Tensor, delta: torch.Tensor, keep: int) -> torch.Tensor:
        """[keep * shares, V]: of the last rows of each share."""
        form, team = self.form, acquire_team()
        counts = [min(keep, text.rows) for text in texts]
        normed = torch.empty(sum(counts), form.hidden)
        logits = torch.empty(sum(counts), form.head.outputs)
        try:
            end = done = 0
            for text, count in zip(texts, counts, strict=True):
                end += text.rows
                last = slice(end - count, end)
                self._steps.add(self._norm(form.norm, x[last], delta[last], normed[done : done + count]))
                done += count
            self._product(form.head, normed, logits)
            self._steps.run(team)
        finally:
            team.release()
            self._steps.clear()
        return logits

    def _buffer(self, name: str, rows: int, width: int) -> torch.Tensor:
        """Memory [rows, width] in fp32 that the next use of this name overwrites."""
        kept = self._buffers.get(name)
        if kept is None or len(kept) < rows:
            with torch.inference_mode(False):
                kept = self._buffers[name] = torch.empty(rows, width)
        return kept[:rows]


def _row(tensor: torch.Tensor, number: int) -> int:
    """The address of a row."""
    return tensor.data_ptr() + number * tensor.stride(0) * tensor.itemsize


def some(units: int, few: int = FEW) -> int:
    """Units that a thread takes at a time: all where they are few."""
    return ALONE if units <= few else 4


def _before(module: nn.Module, args: tuple[Any, ...]) -> None:
    """Call a module's hooks before it."""
    for name, hook in [*module._forward_pre_hooks.items()]:
        hook(module, args, {}) if name in module._forward_pre_hooks_with_kwargs else hook(module, args)


def _after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """Call a module's hooks after it."""
    for name, hook in [*module._forward_hooks.items()]:
        hook(module, args, {}, output) if name in module._forward_hooks_with_kwargs else hook(module, args, output)
