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
from core.memory.codec.native.team_code import LINE
from core.memory.codec.native.threads import acquire_team
from core.runtime.batch import Batch
from core.runtime.kv_cache import SequenceKV
from core.runtime.program import attend, bias, combine, gate, rms, rotate, route
from core.runtime.program.attention import Attention
from core.runtime.program.bind import Layer, bind
from core.runtime.program.feed_forward import Dense, Routed
from core.runtime.program.weights import FP32, NormWeight, Weight

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
    delta: torch.Tensor  # [T, H], what experts, or a dense layer in their place, add to it
    qkv: torch.Tensor
    q: torch.Tensor
    mixed: torch.Tensor  # heads after attention
    attended: torch.Tensor  # [T, H], what attention adds
    shared: torch.Tensor  # [T, H], what the expert that all tokens share adds
    shared_gate: torch.Tensor  # [T, 1]
    ones: torch.Tensor  # [T, 1]
    gates: torch.Tensor  # [T, 2 * inner] of a dense layer
    acts: torch.Tensor  # [T, inner]


class Built(NamedTuple):
    """The steps of every layer up to its experts, for passes over the same numbers of rows in the same KV memory."""

    rows: Rows
    layers: tuple[tuple[Steps, Routing | None], ...]


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
        if form.embedding_scale != 1:
            rows.x.mul_(form.embedding_scale)
        for layer, (steps, routing) in zip(form.layers, built.layers, strict=True):
            team = acquire_team()
            try:
                steps.run(team)
            finally:
                team.release()
            if routing is not None:
                rows.delta.copy_(self._experts(layer, rows, routing, experts))
        logits = self._logits(texts, rows, keep)
        for kv, count in texts:
            kv.memory.grow(kv, count)
            kv.whole = True
        return logits

    def _experts(self, layer: Layer, rows: Rows, routing: Routing, experts: Experts) -> torch.Tensor:
        """What the experts of a layer add to the residual stream; calls the hooks around them."""
        assert isinstance(layer.rest, Routed)
        site, dtype = layer.rest.site, self.form.dtype
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
            attention, dense = layer.attention, layer.dense
            weights = [attention.q, attention.k, attention.v, attention.o]
            for weight in (*weights, *((dense.gate, dense.up, dense.down) if dense is not None else ())):
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
        widths += (hidden, 1, 1, 2 * form.inner, form.inner)
        with torch.inference_mode(False):
            rows = Rows(torch.empty(count, dtype=torch.int64), *[torch.empty(count, width) for width in widths])
            rows.ones.fill_(1)
            layers = []
            for number, layer in enumerate(form.layers):
                routing = None
                if isinstance(layer.rest, Routed):
                    rule = layer.rest.route
                    ids = torch.empty(count, rule.chosen, dtype=torch.int64)
                    routing = Routing(torch.empty(count, rule.experts), ids, torch.empty(count, rule.chosen))
                layers.append((self._layer(number, layer, texts, rows, routing), routing))
        return Built(rows, tuple(layers))

    def _layer(self, number: int, layer: Layer, texts: Sequence[Text], rows: Rows, routing: Routing | None) -> Steps:
        """The steps of a layer up to its experts: the residual stream gets what those of the layer before add."""
        scale, rest = self.form.residual_scale, layer.rest
        steps = Steps(32 + 2 * len(texts), 8192 + 512 * len(texts))
        if number:
            _add_shared(steps, self.form.layers[number - 1], rows)
        steps.add(_norm(layer.before, rows.x, rows.delta if number else None, rows.normed, scale))
        self._attention(steps, number, layer.attention, texts, rows)
        steps.add(_norm(layer.after, rows.x, rows.attended, rows.normed, scale))
        if isinstance(rest, Dense):
            self._dense(steps, rest, rows, rows.delta)
            return steps
        assert routing is not None
        if rest.shared is not None:
            self._dense(steps, rest.shared, rows, rows.shared)
        if rest.shared_gate is not None:
            self._product(steps, rest.shared_gate, rows.normed, rows.shared_gate)
        self._product(steps, rest.router, rows.normed, routing.logits)
        at = {name: one.data_ptr() for name, one in routing._asdict().items()}
        if rest.correction is not None:
            at["bias"] = rest.correction.data_ptr()
        count = len(rows.x)
        steps.add(Work(route.kernel(rest.route), named(route.FIELDS, **at), count, some(count)))
        return steps

    def _dense(self, steps: Steps, form: Dense, rows: Rows, out: torch.Tensor) -> None:
        """The steps of a dense feed-forward layer."""
        count, inner = len(rows.x), form.down.inputs
        gates = rows.gates.view(-1)[: 2 * count * inner].view(count, 2 * inner)
        acts = rows.acts.view(-1)[: count * inner].view(count, inner)
        kept = self._product(steps, form.gate, rows.normed, gates)
        self._product(steps, form.up, rows.normed, gates[:, inner:], kept)
        given, units = named(gate.FIELDS, x=gates.data_ptr(), out=acts.data_ptr()), count * form.form.units
        steps.add(Work(gate.kernel(form.form), given, units, some(units)))
        self._product(steps, form.down, acts, out)

    def _attention(self, steps: Steps, number: int, form: Attention, texts: Sequence[Text], rows: Rows) -> None:
        """The steps from the norm before attention to what it adds to the residual stream."""
        first, kept = 0, ""
        for weight in (form.q, form.k, form.v):
            kept = self._product(steps, weight, rows.normed, rows.qkv[:, first:], kept)
            first += weight.outputs
        first = 0
        for norm in form.across or ():
            part = rows.qkv[:, first : first + norm.form.width]
            steps.add(_norm(norm, part, None, part))
            first += norm.form.width
        turned, attending = form.kernels(self.form.dtype)
        for_turning, for_attending = form.addresses()
        row, begin = form.width * self.form.dtype.itemsize, 0
        for kv, count in texts:
            k, v = kv.memory.addresses()[2 * number : 2 * number + 2]
            at = {"k": k, "v": v, "positions": _row(rows.positions, begin), "q": _row(rows.q, begin)}
            at |= {f"{one}_head_stride": kv.memory.context * row for one in "kv"}
            at |= {f"{one}_row_stride": row for one in "kv"}
            angles = {"cos": _row(rows.cos, begin), "sin": _row(rows.sin, begin)}
            given = named(rotate.FIELDS, qkv=_row(rows.qkv, begin), **for_turning, **angles, **at)
            steps.add(Work(rotate.kernel(turned), given, count * form.heads, some(count * form.heads, 16)))
            at |= for_attending
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
        if weight.bias is not None:
            added = bias.kernel(bias.Bias(weight.outputs, weight.bias.dtype))
            at = named(bias.FIELDS, given=steps.put(given), slots=steps.put([weight.bias.data_ptr()]))
            steps.add(Work(added, at, 1, 1))
        return name

    def _logits(self, texts: Sequence[Text], rows: Rows, keep: int) -> torch.Tensor:
        """[keep * texts, V]: of the last rows of each text."""
        form, steps, team = self.form, self._steps, acquire_team()
        counts = [min(keep, text.rows) for text in texts]
        normed = torch.empty(sum(counts), form.hidden)
        logits = torch.empty(sum(counts), form.head.outputs)
        try:
            _add_shared(steps, form.layers[-1], rows)
            end = done = 0
            for text, count in zip(texts, counts, strict=True):
                end += text.rows
                last = slice(end - count, end)
                out = normed[done : done + count]
                steps.add(_norm(form.norm, rows.x[last], rows.delta[last], out, form.residual_scale))
                done += count
            self._product(steps, form.head, normed, logits)
            steps.run(team)
        finally:
            team.release()
            steps.clear()
        return logits if form.logits_scale == 1 else logits.mul_(form.logits_scale)

    def _memory(self, name: str, size: int) -> int:
        """The address of memory that the next step of this name overwrites. Where it moves, steps are built anew."""
        kept = self._prepared.get(name)
        if kept is None or kept.numel() < size:
            self._kept.clear()
            with torch.inference_mode(False):
                kept = self._prepared[name] = torch.empty(size + LINE, dtype=torch.uint8)
        return kept.data_ptr() + -kept.data_ptr() % LINE


def _norm(norm: NormWeight, x: torch.Tensor, delta: torch.Tensor | None, out: torch.Tensor, scale: float = 1.0) -> Work:
    """x += scale * delta, and its norm."""
    kernel = rms.kernel(rms.Rms(norm.form, FP32, adds=delta is not None, scale=scale))
    at = delta.data_ptr() if delta is not None else 0
    strides = {"x_stride": x.stride(0) * 4, "out_stride": out.stride(0) * 4}
    given = named(rms.FIELDS, x=x.data_ptr(), delta=at, weight=norm.at, out=out.data_ptr(), **strides)
    return Work(kernel, given, len(x), some(len(x)))


def _add_shared(steps: Steps, layer: Layer, rows: Rows) -> None:
    """What the experts of a layer add gets the output of the one that all tokens share."""
    rest, count = layer.rest, len(rows.x)
    if not isinstance(rest, Routed) or rest.shared is None:
        return
    kernel = combine.kernel(combine.Combine(rows.x.shape[1], 1, "gated" if rest.shared_gate is not None else "plain"))
    at = {"experts": rows.delta, "out": rows.delta, "weights": rows.ones, "shared": rows.shared}
    at["shared_gate"] = rows.shared_gate
    given = named(combine.FIELDS, pairs=numbered(0), **{name: one.data_ptr() for name, one in at.items()})
    steps.add(Work(kernel, given, count, some(count)))


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
