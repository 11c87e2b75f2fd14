"""A pass over a model on a CPU in the fast arithmetic: everything but the experts of a layer is one native call.

The experts are computed by the step that transformers' hooks would call, with the same arguments, so that routing,
recording, policies, prefetch and lossy modes are the same in both arithmetics. Hooks on embeddings, on the norm before
a router, on routers and on experts are called as in a pass of transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from core.hf.discover import ExpertsSite
from core.memory.codec.fast import plain
from core.memory.codec.fast.products import CanonicalProducts, numbered
from core.memory.codec.fast.steps import Steps, Work, named
from core.memory.codec.native.threads import LINE, acquire_team
from core.runtime.batch import Batch
from core.runtime.kv_cache import SequenceKV
from core.runtime.program import attend, rms, rotate, route
from core.runtime.program.bind import FP32, Attention, Layer, NormWeight, Weight, bind

ALONE = 1 << 30  # units that one thread computes: others would join too late
KEPT, LONG = 8, 64  # kinds of passes whose steps are kept, of up to so many rows; of longer ones the last alone
FEW = 8  # rows up to which norms and routing are computed by one thread

Experts = Callable[[ExpertsSite, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Text(NamedTuple):
    """Some rows of a pass: the next tokens of one sequence."""

    kv: SequenceKV
    rows: int


class Routing(NamedTuple):
    """What the router of a layer gives, of all rows."""

    logits: torch.Tensor  # [T, E] fp32
    ids: torch.Tensor  # [T, k] int64
    weights: torch.Tensor  # [T, k] fp32


class Rows(NamedTuple):
    """What passes over as many rows share: fp32 but for the positions, and written anew by each layer."""

    positions: torch.Tensor  # [T] int64
    cos: torch.Tensor  # [T, rotated / 2]
    sin: torch.Tensor
    x: torch.Tensor  # [T, H], the residual stream
    normed: torch.Tensor  # [T, H]
    delta: torch.Tensor  # [T, H], what the experts add to it
    qkv: torch.Tensor
    q: torch.Tensor
    mixed: torch.Tensor  # heads after attention
    attended: torch.Tensor  # [T, H], what attention adds


class Built(NamedTuple):
    """The steps of every layer up to its experts, for passes over the same numbers of rows in the same KV memory."""

    rows: Rows
    layers: tuple[tuple[Steps, Routing], ...]


class Program:
    """For one model. One pass at a time."""

    def __init__(self, model: Any, sites: Sequence[ExpertsSite], context: int) -> None:
        """Raises ModelError, with the reason, where the model is not known."""
        self.form = bind(model, sites, context)
        self._steps = Steps()
        self._kept: dict[object, Built] = {}
        self._prepared: dict[str, torch.Tensor] = {}

    @torch.inference_mode()
    def compute(self, batch: Batch, keep: int, experts: Experts) -> torch.Tensor:
        """As `core.runtime.batch.compute` -> logits [keep * shares, V] in fp32."""
        form, tokens, first = self.form, batch.tokens, self.form.layers[0].attention
        texts = [Text(share.kv, len(share.tokens)) for share in batch.shares if share.kv is not None]
        assert len(texts) == len(batch.shares), "there is nothing that the tokens follow"
        for kv, _ in texts:
            kv.whole = False
            kv.memory.allocate(kv, first.heads, first.width, form.dtype)
        built = self._built(texts)
        rows = built.rows
        begin = 0
        for kv, count in texts:
            torch.arange(kv.length, kv.length + count, out=rows.positions[begin : begin + count])
            begin += count
        for angles, table in ((rows.cos, form.cos), (rows.sin, form.sin)):
            torch.index_select(table, 0, rows.positions, out=angles)
        rows.x.copy_(form.embedding(torch.tensor([tokens]))[0])
        for layer, (steps, routing) in zip(form.layers, built.layers, strict=True):
            team = acquire_team()
            try:
                steps.run(team)
            finally:
                team.release()
            rows.delta.copy_(self._experts(layer, rows, routing, experts))
        logits = self._logits(texts, rows, keep)
        for kv, count in texts:
            kv.memory.grow(kv, count)
            kv.whole = True
        return logits

    def _experts(self, layer: Layer, rows: Rows, routing: Routing, experts: Experts) -> torch.Tensor:
        """What the experts of a layer add to the residual stream; calls the hooks around them."""
        site, dtype = layer.site, self.form.dtype
        if layer.after_module._forward_pre_hooks:
            _before(layer.after_module, (rows.x.to(dtype),))
        if site.router._forward_hooks or site.router._forward_pre_hooks:
            seen = rows.normed.to(dtype)
            _before(site.router, (seen,))
            _after(site.router, (seen,), (routing.logits.to(dtype), routing.weights.to(dtype), routing.ids))
        given = rows.normed, routing.ids, routing.weights
        if site.module._forward_pre_hooks:
            _before(site.module, given)
        output = experts(site, *given)
        if site.module._forward_hooks:
            _after(site.module, given, output)
        return output

    def products(self) -> Iterator[CanonicalProducts]:
        """Of the model's dense layers."""
        for layer in self.form.layers:
            attention = layer.attention
            for weight in (attention.q, attention.k, attention.v, attention.o):
                yield weight.products
        yield self.form.head.products

    # ------------------------------------------------------------------ steps

    def _built(self, texts: Sequence[Text]) -> Built:
        """The steps of a pass: those of the last few kinds are kept."""
        key = tuple([(count, kv.memory.context, *kv.memory.addresses()) for kv, count in texts])
        built = self._kept.pop(key, None) or self._build(texts)
        self._kept[key] = built  # as the last one
        if len(self._kept) > (KEPT if len(built.rows.x) <= LONG else 1):
            self._kept.pop(next(iter(self._kept)))
        return built

    def _build(self, texts: Sequence[Text]) -> Built:
        count, form = sum(text.rows for text in texts), self.form
        attention, hidden = form.layers[0].attention, form.hidden
        heads = attention.query_heads * attention.width
        widths = (*form.cos.shape[1:] * 2, hidden, hidden, hidden, attention.outputs, heads, heads, hidden)
        with torch.inference_mode(False):
            rows = Rows(torch.empty(count, dtype=torch.int64), *[torch.empty(count, width) for width in widths])
            layers = []
            for number, layer in enumerate(form.layers):
                chosen = layer.route.chosen
                routing = Routing(
                    torch.empty(count, layer.router.outputs),
                    torch.empty(count, chosen, dtype=torch.int64),
                    torch.empty(count, chosen),
                )
                layers.append((self._layer(number, layer, texts, rows, routing), routing))
        return Built(rows, tuple(layers))

    def _layer(self, number: int, layer: Layer, texts: Sequence[Text], rows: Rows, routing: Routing) -> Steps:
        """The steps of a layer up to its experts: the residual stream gets what those of the layer before add."""
        steps, count = Steps(16 + 2 * len(texts), 4096 + 512 * len(texts)), len(rows.x)
        steps.add(_norm(layer.before, rows.x, rows.delta if number else None, rows.normed))
        self._attention(steps, number, layer.attention, texts, rows)
        steps.add(_norm(layer.after, rows.x, rows.attended, rows.normed))
        self._product(steps, layer.router, rows.normed, routing.logits)
        at = {name: one.data_ptr() for name, one in routing._asdict().items()}
        steps.add(Work(route.kernel(layer.route), named(route.FIELDS, **at), count, some(count)))
        return steps

    def _attention(self, steps: Steps, number: int, form: Attention, texts: Sequence[Text], rows: Rows) -> None:
        """The steps from the norm before attention to what it adds to the residual stream."""
        first, kept = 0, ""
        for weight in (form.q, form.k, form.v):
            kept = self._product(steps, weight, rows.normed, rows.qkv[:, first:], kept)
            first += weight.outputs
        turned, attending = form.kernels(self.form.dtype, 2 * self.form.cos.shape[1])
        bias = form.bias.data_ptr() if form.bias is not None else 0
        both = {"q_weight": form.q_norm, "k_weight": form.k_norm}
        norms = {name: one.at for name, one in both.items() if one is not None}
        row, begin = form.width * self.form.dtype.itemsize, 0
        for kv, count in texts:
            k, v = kv.memory.addresses()[2 * number : 2 * number + 2]
            at = {"k": k, "v": v, "positions": _row(rows.positions, begin), "q": _row(rows.q, begin)}
            at |= {f"{one}_head_stride": kv.memory.context * row for one in "kv"}
            at |= {f"{one}_row_stride": row for one in "kv"}
            angles = {"cos": _row(rows.cos, begin), "sin": _row(rows.sin, begin)}
            given = named(rotate.FIELDS, qkv=_row(rows.qkv, begin), bias=bias, **norms, **angles, **at)
            steps.add(Work(rotate.kernel(turned), given, count * form.heads, some(count * form.heads, 16)))
            given = named(attend.FIELDS, out=_row(rows.mixed, begin), rows=count, window=attend.NO_WINDOW, **at)
            steps.add(Work(attend.kernel(attending), given, count * form.heads, 1))
            begin += count
        self._product(steps, form.o, rows.mixed, rows.attended)

    def _product(self, steps: Steps, weight: Weight, x: torch.Tensor, out: torch.Tensor, kept: str = "") -> str:
        """out = x times a weight; `kept` names rows that were prepared of the same x before. Returns the name now."""
        products, rows = weight.products, len(x)
        one = products.matrix
        if not one.bits and plain.padded(one.inputs) == x.stride(0):
            prepared, name = x.data_ptr(), "plain"
        else:
            name = f"prepared {one.bits} {min(one.group, 64)} {one.table} {one.inputs}"
            prepared = self._memory(name, rows * products.prepared_bytes)
            if name != kept:
                steps.add(products.prepare(x.data_ptr(), x.stride(0) * 4, rows, prepared))
        given = prepared, numbered(0), rows, out.data_ptr(), out.stride(0) * 4
        steps.add(products.multiply(steps, given, (weight.slot,), FP32))
        return name

    def _logits(self, texts: Sequence[Text], rows: Rows, keep: int) -> torch.Tensor:
        """[keep * texts, V]: of the last rows of each text."""
        form, steps, team = self.form, self._steps, acquire_team()
        counts = [min(keep, text.rows) for text in texts]
        normed = torch.empty(sum(counts), form.hidden)
        logits = torch.empty(sum(counts), form.head.outputs)
        try:
            end = done = 0
            for text, count in zip(texts, counts, strict=True):
                end += text.rows
                last = slice(end - count, end)
                steps.add(_norm(form.norm, rows.x[last], rows.delta[last], normed[done : done + count]))
                done += count
            self._product(steps, form.head, normed, logits)
            steps.run(team)
        finally:
            team.release()
            steps.clear()
        return logits

    def _memory(self, name: str, size: int) -> int:
        """The address of memory that the next step of this name overwrites. Where it moves, steps are built anew."""
        kept = self._prepared.get(name)
        if kept is None or kept.numel() < size:
            self._kept.clear()
            with torch.inference_mode(False):
                kept = self._prepared[name] = torch.empty(size + LINE, dtype=torch.uint8)
        return kept.data_ptr() + -kept.data_ptr() % LINE


def _norm(norm: NormWeight, x: torch.Tensor, delta: torch.Tensor | None, out: torch.Tensor) -> Work:
    """x += delta, and its norm."""
    kernel = rms.kernel(rms.Rms(norm.form, FP32, adds=delta is not None))
    at = delta.data_ptr() if delta is not None else 0
    strides = {"x_stride": x.stride(0) * 4, "out_stride": out.stride(0) * 4}
    given = named(rms.FIELDS, x=x.data_ptr(), delta=at, weight=norm.at, out=out.data_ptr(), **strides)
    return Work(kernel, given, len(x), some(len(x)))


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
