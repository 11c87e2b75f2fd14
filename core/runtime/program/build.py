"""The steps of passes over as many rows of as many sequences: from the embeddings to the logits, layer by layer.

Of one row, the steps of a layer's experts follow its router, for where each is in a slot; the caller computes all
others.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from core.memory.codec.fast import plain
from core.memory.codec.fast.products import GIVEN, CanonicalProducts, numbered
from core.memory.codec.fast.steps import Steps, Work, named
from core.memory.codec.native.team_code import LINE
from core.runtime.kv_cache import SequenceKV
from core.runtime.program import attend, bias, combine, gate, gather, look, rms, rotate, route
from core.runtime.program.attention import Attention
from core.runtime.program.bind import Form, Layer
from core.runtime.program.experts import ExpertKernels
from core.runtime.program.feed_forward import Dense, Routed
from core.runtime.program.several import several
from core.runtime.program.weights import FP32, NormWeight, Weight

ALONE = 1 << 30  # units that one thread computes: others would join too late
FEW = 8  # rows up to which norms and routing are computed by one thread
STEPS, ROOM = 48, 12288  # steps of a layer, and bytes of their arguments, without those of each sequence
STEPS_OF_TEXT, ROOM_OF_TEXT = 2, 512


class Text(NamedTuple):
    """Some rows of a pass: the next tokens of one sequence, of which the last `kept` have logits."""

    kv: SequenceKV
    memory: tuple[int, ...]  # the addresses of its keys and values, of each layer
    rows: int
    kept: int


class Routing(NamedTuple):
    """What the router of a layer gives, of all rows, and where its experts are in the steps: the first that is not for
    the router, the one after those that look for slots, and the one after all of the layer."""

    layer: Layer
    rest: Routed
    logits: torch.Tensor  # [T, E] fp32
    ids: torch.Tensor  # [T, k] int64
    at: int  # where they begin among those of all layers
    weights: torch.Tensor  # [T, k] fp32
    routed: int = 0
    looked: int = 0
    end: int = 0


class Rows(NamedTuple):
    """What the layers of a pass share: fp32, and written anew by each layer."""

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
    """The steps of a pass, and the memory that they compute in."""

    rows: Rows
    steps: Steps
    routings: tuple[Routing, ...]
    ids: torch.Tensor  # int64: those of all layers, one after the other
    normed: torch.Tensor  # [kept, H], of which logits are computed
    tokens: int  # where the tokens are among the steps' arguments
    positions: int  # where their positions are
    embedded: int  # the first step after the one that writes the embeddings
    logits: int  # where the address of the logits is
    table: int  # where that of the experts' slots is
    hooks: tuple[Mapping[int, object], ...]  # those that want to see the experts of a layer

    def chosen(self, begin: int, end: int) -> list[list[int]]:
        """The experts of a single row by the routings begin..end - 1."""
        every = self.ids.tolist()
        return [every[one.at : one.at + one.rest.route.chosen] for one in self.routings[begin:end]]


class Memory:
    """Memory by name, which the next step of that name overwrites. `moved` counts how often any of it was elsewhere."""

    def __init__(self) -> None:
        self._kept: dict[str, torch.Tensor] = {}
        self.moved = 0

    def at(self, name: str, size: int) -> int:
        """The address of so many bytes."""
        kept = self._kept.get(name)
        if kept is None or kept.numel() < size + LINE:
            self.moved += kept is not None
            with torch.inference_mode(False):
                kept = self._kept[name] = torch.empty(size + LINE, dtype=torch.uint8)
        return kept.data_ptr() + -kept.data_ptr() % LINE


class Builder:
    """Builds the steps of one kind of pass over a model: `built` is the result."""

    def __init__(self, form: Form, kernels: ExpertKernels, memory: Memory, texts: Sequence[Text]) -> None:
        self._form, self._kernels, self._memory, self._texts = form, kernels, memory, texts
        self._count = sum([text.rows for text in texts])
        layers = len(form.layers) + 1
        each = STEPS + STEPS_OF_TEXT * len(texts), ROOM + ROOM_OF_TEXT * len(texts)
        self._steps = steps = Steps(layers * each[0], layers * each[1] + 16 * self._count)
        self._table, tokens = steps.put([0]), steps.put([0] * self._count)
        self._positions = steps.put([0] * self._count)
        chosen = sum([layer.rest.route.chosen for layer in form.layers if isinstance(layer.rest, Routed)])
        with torch.inference_mode(False):
            self._rows = self._made_rows()
            self._normed = torch.empty(sum([text.kept for text in texts]), form.hidden)
            self._ids, self._routed_ids = torch.empty(chosen * self._count, dtype=torch.int64), 0
            embedded = self._begin(tokens)
            routings = [self._layer(number, layer) for number, layer in enumerate(form.layers)]
        logits = self._head()
        found = tuple([one for one in routings if one is not None])
        addresses = tokens, self._positions, embedded, logits, self._table
        hooks = tuple([hooks for one in found for hooks in _hooks(one)])
        self.built = Built(self._rows, steps, found, self._ids, self._normed, *addresses, hooks)

    def _made_rows(self) -> Rows:
        count, form = self._count, self._form
        attention, hidden = form.layers[0].attention, form.hidden
        heads = attention.query_heads * attention.width
        widths = (*form.cos.shape[1:] * 2, hidden, hidden, hidden, attention.outputs, heads, heads, hidden)
        widths += (hidden, 1, 1, 2 * form.inner, form.inner)
        rows = Rows(*[torch.empty(count, width) for width in widths])
        rows.ones.fill_(1)
        return rows

    def _begin(self, tokens: int) -> int:
        """The steps that write the embeddings, and after them the angles -> the first of the latter."""
        form, rows, steps = self._form, self._rows, self._steps
        embeddings = form.embedding.weight
        assert isinstance(embeddings, torch.Tensor)
        self._gather(embeddings, tokens, rows.x, form.embedding_scale)
        embedded = len(steps)
        self._gather(form.cos, self._positions, rows.cos)
        self._gather(form.sin, self._positions, rows.sin)
        return embedded

    def _gather(self, table: torch.Tensor, indices: int, out: torch.Tensor, scale: float = 1.0) -> None:
        kernel = gather.kernel(gather.Gather(out.shape[1], table.dtype, scale))
        given = named(gather.FIELDS, table=table.data_ptr(), indices=indices, out=out.data_ptr())
        self._steps.add(Work(kernel, given, self._count, some(self._count)))

    def _layer(self, number: int, layer: Layer) -> Routing | None:
        """The steps of a layer: the residual stream gets what the experts of the layer before add."""
        scale, rest, rows, steps = self._form.residual_scale, layer.rest, self._rows, self._steps
        if number:
            self._add_shared(self._form.layers[number - 1])
        steps.add(norm(layer.before, rows.x, rows.delta if number else None, rows.normed, scale))
        self._attention(number, layer.attention)
        steps.add(norm(layer.after, rows.x, rows.attended, rows.normed, scale))
        if isinstance(rest, Dense):
            self._dense(rest, rows.delta)
            return None
        if rest.shared is not None:
            self._dense(rest.shared, rows.shared)
        if rest.shared_gate is not None:
            self._product((rest.shared_gate,), rows.normed, (rows.shared_gate,))
        return self._routed(layer, rest)

    def _routed(self, layer: Layer, rest: Routed) -> Routing:
        """A router, and the experts of one row."""
        rule, count, steps = rest.route, self._count, self._steps
        begin, self._routed_ids = self._routed_ids, self._routed_ids + count * rule.chosen
        ids = self._ids[begin : self._routed_ids].view(count, rule.chosen)
        logits, weights = torch.empty(count, rule.experts), torch.empty(count, rule.chosen)
        routing = Routing(layer, rest, logits, ids, begin, weights)
        self._product((rest.router,), self._rows.normed, (routing.logits,))
        at = {name: getattr(routing, name).data_ptr() for name in ("logits", "ids", "weights")}
        if rest.correction is not None:
            at["bias"] = rest.correction.data_ptr()
        steps.add(Work(route.kernel(rule), named(route.FIELDS, **at), count, some(count)))
        routed = looked = end = len(steps)
        if count == 1:
            slots = steps.put([0] * rule.chosen)
            given = {"ids": ids.data_ptr(), "first": rest.site.index * rule.experts, "table": self._table}
            steps.add(Work(look.kernel(rule.chosen), named(look.FIELDS, slots=slots, stop=steps.stop, **given), 1, 1))
            looked = len(steps)
            memory = self._memory.at("experts", self._kernels.token_memory(rule.chosen))
            x, total = self._rows.normed.data_ptr(), self._rows.delta.data_ptr()
            steps.extend(self._kernels.token(steps, rule.chosen, x, routing.weights.data_ptr(), slots, total, memory))
            end = len(steps)
        return routing._replace(routed=routed, looked=looked, end=end)

    def _dense(self, form: Dense, out: torch.Tensor) -> None:
        """The steps of a dense feed-forward layer."""
        rows, count, inner = self._rows, self._count, form.down.inputs
        gates = rows.gates.view(-1)[: 2 * count * inner].view(count, 2 * inner)
        acts = rows.acts.view(-1)[: count * inner].view(count, inner)
        self._product((form.gate, form.up), rows.normed, (gates, gates[:, inner:]))
        given, units = named(gate.FIELDS, x=gates.data_ptr(), out=acts.data_ptr()), count * form.form.units
        self._steps.add(Work(gate.kernel(form.form), given, units, some(units)))
        self._product((form.down,), acts, (out,))

    def _attention(self, number: int, form: Attention) -> None:
        """The steps from the norm before attention to what it adds to the residual stream."""
        rows, steps = self._rows, self._steps
        starts = 0, form.q.outputs, form.q.outputs + form.k.outputs
        self._product((form.q, form.k, form.v), rows.normed, [rows.qkv[:, first:] for first in starts])
        first = 0
        for across in form.across or ():
            part = rows.qkv[:, first : first + across.form.width]
            steps.add(norm(across, part, None, part))
            first += across.form.width
        turned, attending = form.kernels(self._form.dtype)
        for_turning, for_attending = form.addresses()
        row, begin = form.width * self._form.dtype.itemsize, 0
        for kv, memory, count, _ in self._texts:
            k, v = memory[2 * number : 2 * number + 2]
            at = {"k": k, "v": v, "positions": self._positions + 8 * begin, "q": row_at(rows.q, begin)}
            at |= {f"{one}_head_stride": kv.memory.context * row for one in "kv"}
            at |= {f"{one}_row_stride": row for one in "kv"}
            angles = {"cos": row_at(rows.cos, begin), "sin": row_at(rows.sin, begin)}
            given = named(rotate.FIELDS, qkv=row_at(rows.qkv, begin), **for_turning, **angles, **at)
            steps.add(Work(rotate.kernel(turned), given, count * form.heads, some(count * form.heads, 16)))
            at |= for_attending
            given = named(attend.FIELDS, out=row_at(rows.mixed, begin), rows=count, window=attend.NO_WINDOW, **at)
            steps.add(Work(attend.kernel(attending), given, count * form.heads, 1))
            begin += count
        self._product((form.o,), rows.mixed, (rows.attended,))

    def _head(self) -> int:
        """The steps from the last layer to the logits -> where their address is."""
        form, rows, normed = self._form, self._rows, self._normed
        self._add_shared(form.layers[-1])
        end = done = 0
        for _, _, count, kept in self._texts:
            end += count
            last, out = slice(end - kept, end), normed[done : done + kept]
            self._steps.add(norm(form.norm, rows.x[last], rows.delta[last], out, form.residual_scale))
            done += kept
        (given,) = self._product((form.head,), normed, (torch.empty(0, form.head.outputs),))
        return given + 8 * (GIVEN - 2)

    def _add_shared(self, layer: Layer) -> None:
        """What the experts of a layer add gets the output of the one that all tokens share."""
        rest, rows = layer.rest, self._rows
        if not isinstance(rest, Routed) or rest.shared is None:
            return
        form = combine.Combine(self._form.hidden, 1, "gated" if rest.shared_gate is not None else "plain")
        at = {"experts": rows.delta, "out": rows.delta, "weights": rows.ones, "shared": rows.shared}
        at["shared_gate"] = rows.shared_gate
        given = named(combine.FIELDS, pairs=numbered(0), **{name: one.data_ptr() for name, one in at.items()})
        self._steps.add(Work(combine.kernel(form), given, self._count, some(self._count)))

    def _product(self, weights: Sequence[Weight], x: torch.Tensor, outs: Sequence[torch.Tensor]) -> list[int]:
        """Each of `outs` = x times a weight, all in one step -> where the GIVEN numbers of each are."""
        steps, rows, found = self._steps, len(x), list[int]()
        works, prepared = list[Work](), dict[str, int]()
        for _, group in itertools.groupby(zip(weights, outs, strict=True), key=lambda one: one[0].products.matrix):
            alike = [*group]
            products = alike[0][0].products
            at = self._prepared(products, x, prepared)
            given = [
                number for _, out in alike for number in (at, numbered(0), rows, out.data_ptr(), out.stride(0) * 4)
            ]
            works.append(products.multiply(steps, given, [weight.slot for weight, _ in alike], FP32))
            found += [works[-1].arguments[0] + 8 * GIVEN * i for i in range(len(alike))]
        steps.add(works[0] if len(works) == 1 else several([(one, steps.put(one.arguments)) for one in works]))
        for weight, given_at in zip(weights, found, strict=True):
            if weight.bias is not None:
                added = bias.kernel(bias.Bias(weight.outputs, weight.bias.dtype))
                addresses = named(bias.FIELDS, given=given_at, slots=steps.put([weight.bias.data_ptr()]))
                steps.add(Work(added, addresses, 1, 1))
        return found

    def _prepared(self, products: CanonicalProducts, x: torch.Tensor, prepared: dict[str, int]) -> int:
        """The address of x as a product takes it. `prepared`: those that are, by form; gets what a step more writes."""
        one, rows = products.matrix, len(x)
        if not one.bits and plain.padded(one.inputs) == x.stride(0):
            return x.data_ptr()
        name = f"prepared {one.bits} {min(one.group, 64)} {one.table} {one.inputs}"
        if name not in prepared:
            prepared[name] = self._memory.at(name, rows * products.prepared_bytes)
            self._steps.add(products.prepare(x.data_ptr(), x.stride(0) * 4, rows, prepared[name]))
        return prepared[name]


def _hooks(routing: Routing) -> list[Mapping[int, object]]:
    """The hooks around a layer's experts, as they are at any time."""
    router, module = routing.rest.site.router, routing.rest.site.module
    before = routing.layer.after_module, router, module
    return [*[one._forward_pre_hooks for one in before], router._forward_hooks, module._forward_hooks]


def norm(of: NormWeight, x: torch.Tensor, delta: torch.Tensor | None, out: torch.Tensor, scale: float = 1.0) -> Work:
    """x += scale * delta, and its norm."""
    kernel = rms.kernel(rms.Rms(of.form, FP32, adds=delta is not None, scale=scale))
    at = delta.data_ptr() if delta is not None else 0
    strides = {"x_stride": x.stride(0) * 4, "out_stride": out.stride(0) * 4}
    given = named(rms.FIELDS, x=x.data_ptr(), delta=at, weight=of.at, out=out.data_ptr(), **strides)
    return Work(kernel, given, len(x), some(len(x)))


def row_at(tensor: torch.Tensor, number: int) -> int:
    """The address of a row."""
    return tensor.data_ptr() + number * tensor.stride(0) * tensor.itemsize


def some(units: int, few: int = FEW) -> int:
    """Units that a thread takes at a time: all where they are few."""
    return ALONE if units <= few else 4
