"""The steps of passes over as many rows of as many sequences: from the embeddings to the logits, layer by layer.

Of a few rows, the steps of a layer's experts follow its router, for where each is in a slot; the caller computes all
others.
"""

import itertools
from collections.abc import Sequence

import torch

from core.memory.codec.fast import plain
from core.memory.codec.fast.products import GIVEN, CanonicalProducts, numbered
from core.memory.codec.fast.steps import Steps, Work, named, some
from core.policy.predict.base import RouterPlan
from core.runtime.program import bias, combine, gate, gather, routers, row_steps
from core.runtime.program.bind import Form, Layer
from core.runtime.program.built import Built, Memory, Routing, Rows, hooks_around, placed
from core.runtime.program.experts import ExpertKernels
from core.runtime.program.feed_forward import Dense, Routed
from core.runtime.program.mixer import Text, norm
from core.runtime.program.several import several
from core.runtime.program.weights import FP32, NormWeight, Weight

STEPS, ROOM = 48, 12288  # steps of a layer without its mixer, and bytes of their arguments
ROOM_OF_STEP = 256  # bytes of the arguments of a mixer's step, and of one that asks a router
ASKING = 5  # steps for each router that is asked about a layer's state
PAIR = 128  # bytes of the arguments of a row and one of its experts


class Builder:
    """Builds the steps of one kind of pass over a model: `built` is the result."""

    def __init__(
        self,
        form: Form,
        kernels: Sequence[ExpertKernels],
        memory: Memory,
        texts: Sequence[Text],
        plan: RouterPlan | None = None,
        holds: bool = False,
    ) -> None:
        """`kernels`: those of each MoE layer. `plan`, for one row: other routers are asked about each layer's state,
        and their experts looked up, too. `holds`: states stay as they are, until `Built.settle`."""
        self._form, self._kernels, self._memory, self._plan = form, kernels, memory, plan
        self.holds, self.later = holds, list[Work]()
        self.texts: Sequence[Text] = [placed(text, at) for at, text in enumerate(texts)]
        self._routings, self._rests = list[Routing](), [one.rest for one in form.layers if isinstance(one.rest, Routed)]
        self.count = sum([text.rows for text in texts])
        self._few = self.count <= row_steps.MOST and kernels[0].blocks == 1  # their slots are looked up
        rows = [text.rows for text in texts]
        mixing, layers = sum([layer.mixer.steps_of(rows) for layer in form.layers]), len(form.layers) + 1
        asking = 0 if plan is None else layers * ASKING * (1 + min(plan.distance, layers))
        chosen = sum([one.route.chosen for one in self._rests])
        room = layers * ROOM + (mixing + asking) * ROOM_OF_STEP + (16 + chosen * PAIR * self._few) * self.count
        self.steps = steps = Steps(layers * STEPS + mixing + asking, room)
        self._table, tokens = steps.put([0]), steps.put([0] * self.count)
        self.positions = steps.put([0] * self.count)
        self._scratch, self._angles = dict[tuple[str, int], torch.Tensor](), dict[int, torch.Tensor]()
        with torch.inference_mode(False):
            self._rows = self._made_rows()
            self._normed = torch.empty(sum([text.kept for text in texts]), form.hidden)
            self._ids, self._routed_ids = torch.empty(chosen * self.count, dtype=torch.int64), 0
            embeddings = form.embedding.weight
            assert isinstance(embeddings, torch.Tensor)
            self._gather(embeddings, tokens, self._rows.x, form.embedding_scale)
            embedded = len(steps)
            for number, layer in enumerate(form.layers):
                self._layer(number, layer)
        self._kept = list[slice]()
        logits, found = self._head(), tuple(self._routings)
        addresses = tokens, self.positions, embedded, len(steps), logits, self._table
        steps.extend(self.later)
        hooks = tuple([hooks for one in found for hooks in hooks_around(one)])
        bound, kept = [text.held for text in texts], tuple(self._kept)
        given = self._rows, self._scratch, steps, found, self._ids, self._normed
        self.built = Built(*given, *addresses, hooks, bound, kept)

    def _made_rows(self) -> Rows:
        form, hidden = self._form, self._form.hidden
        widths = hidden, hidden, hidden, hidden, hidden, 1, 1, 2 * form.inner, form.inner
        rows = Rows(*[torch.empty(self.count, width) for width in widths])
        rows.ones.fill_(1)
        return rows

    def scratch(self, name: str, width: int, most: int = 0) -> torch.Tensor:
        found = self._scratch.get((name, width))
        if found is None:
            found = self._scratch[name, width] = torch.empty(min(self.count, most or self.count), width)
        return found

    def angles(self, table: torch.Tensor) -> torch.Tensor:
        found = self._angles.get(table.data_ptr())
        if found is None:
            found = self.scratch(f"angles {len(self._angles)}", table.shape[1])
            self._angles[table.data_ptr()] = found
            self._gather(table, self.positions, found)
        return found

    def _gather(self, table: torch.Tensor, indices: int, out: torch.Tensor, scale: float = 1.0) -> None:
        kernel = gather.kernel(gather.Gather(out.shape[1], table.dtype, scale))
        given = named(gather.FIELDS, table=table, indices=indices, out=out)
        self.steps.add(Work(kernel, given, self.count, some(self.count)))

    def _layer(self, number: int, layer: Layer) -> None:
        """The steps of a layer: the residual stream gets what the experts of the layer before add."""
        rest, rows, steps = layer.rest, self._rows, self.steps
        last = self._form.layers[number - 1] if number else None
        if last is not None:
            self._added(last)
        delta, factor = (rows.delta, last.factor) if last is not None else (None, None)
        self._read(layer.before, delta, factor)
        layer.mixer.add(self, number, rows.normed, rows.mixed)
        if layer.mixed is not None:
            steps.add(norm(layer.mixed, rows.mixed, None, rows.mixed))
        self._read(layer.after, rows.mixed)
        if isinstance(rest, Dense):
            self._dense(rest, rows.delta)
            return
        if rest.shared is not None:
            self._dense(rest.shared, rows.shared)
        if rest.shared_gate is not None:
            self.product((rest.shared_gate,), rows.normed, (rows.shared_gate,))
        self._routings.append(self._routed(layer, rest))

    def _read(self, of: NormWeight | None, delta: torch.Tensor | None, factor: torch.Tensor | None = None) -> None:
        """Add to the residual stream, and have it, normed if there is a norm, in `normed`."""
        rows = self._rows
        if of is not None:
            self.steps.add(norm(of, rows.x, delta, rows.normed, self._form.residual_scale, factor))
            return
        if delta is not None:
            self._combine(delta, rows.x, "plain", rows.x)
        self._combine(rows.x, rows.normed)

    def _routed(self, layer: Layer, rest: Routed) -> Routing:
        """A router, and the experts of a few rows."""
        rule, count, steps = rest.route, self.count, self.steps
        begin, self._routed_ids = self._routed_ids, self._routed_ids + count * rule.chosen
        ids = self._ids[begin : self._routed_ids].view(count, rule.chosen)
        logits, weights = torch.empty(count, rule.experts), torch.empty(count, rule.chosen)
        routing = Routing(layer, rest, logits, ids, begin, weights)
        states = self._rows.normed
        if rest.beside is not None:
            states = self.scratch("router", self._form.hidden)
            steps.add(norm(rest.beside.router, self._rows.x, None, states))
            steps.add(norm(rest.beside.experts, self._rows.x, None, self._rows.normed))
        self.product((rest.router,), states, (routing.logits,))
        routers.choose(steps, rest, logits, ids, weights)
        plan, rests, at = self._plan, self._rests, len(self._routings)
        answers = routers.ask(self, plan, rests, at, states) if plan is not None else None
        routed = looked = end = len(steps)
        if self._few:
            kernels = self._kernels[rest.site.index]
            memory = self._memory.at("experts", kernels.token_memory(row_steps.MOST * rule.chosen, row_steps.MOST))
            x, total = self._rows.normed, self._rows.delta
        if self._few and count > 1:
            given_rows = row_steps.LayerRows(x, ids, weights, total, rest.site.index * rule.experts, rule.experts)
            looked = row_steps.add(steps, kernels, given_rows, self._table, memory)
            end = len(steps)
        elif self._few:
            slots = routers.find(steps, rest, ids, self._table)
            for layer_at, row in zip(answers.layers, answers.ids, strict=True) if answers is not None else ():
                routers.find(steps, rests[layer_at], row, self._table)
            if plan is not None and plan.last == "experts" and at and at + 1 == len(rests):
                routers.find(steps, rests[0], self._routings[0].ids, self._table)
            looked = len(steps)
            given = x.data_ptr(), weights.data_ptr(), slots, total.data_ptr(), memory
            steps.extend(kernels.token(steps, rule.chosen, *given))
            end = len(steps)
        return routing._replace(answers=answers, routed=routed, looked=looked, end=end)

    def _dense(self, form: Dense, out: torch.Tensor) -> None:
        """The steps of a dense feed-forward layer."""
        rows, count, inner = self._rows, self.count, form.down.inputs
        gates = rows.gates.view(-1)[: 2 * count * inner].view(count, 2 * inner)
        acts = rows.acts.view(-1)[: count * inner].view(count, inner)
        self.product(form.first, rows.normed, (gates, gates[:, inner:])[: len(form.first)])
        given, units = named(gate.FIELDS, x=gates, out=acts), count * form.form.units
        self.steps.add(Work(gate.kernel(form.form), given, units, some(units)))
        self.product((form.down,), acts, (out,))

    def _head(self) -> int:
        """The steps from the last layer to the logits -> where their address is."""
        form, rows, normed = self._form, self._rows, self._normed
        self._added(last := form.layers[-1])
        end = done = 0
        for _, _, count, kept in self.texts:
            end += count
            some_rows, out = slice(end - kept, end), normed[done : done + kept]
            self._kept.append(some_rows)
            x, delta = rows.x[some_rows], rows.delta[some_rows]
            self.steps.add(norm(form.norm, x, delta, out, form.residual_scale, last.factor))
            done += kept
        (given,) = self.product((form.head,), normed, (torch.empty(0, form.head.outputs),))
        return given + 8 * (GIVEN - 2)

    def _added(self, layer: Layer) -> None:
        """What a layer adds to the residual stream after its mixer, where its experts alone are not all."""
        rest, rows = layer.rest, self._rows
        if isinstance(rest, Routed) and rest.shared is not None:
            if rest.beside is not None:
                self.steps.add(norm(rest.beside.after_experts, rows.delta, None, rows.delta))
                self.steps.add(norm(rest.beside.after_shared, rows.shared, None, rows.shared))
            self._combine(rows.delta, rows.delta, "gated" if rest.shared_gate is not None else "plain", rows.shared)
        if layer.added is not None:
            self.steps.add(norm(layer.added, rows.delta, None, rows.delta))

    def _combine(
        self, x: torch.Tensor, out: torch.Tensor, how: combine.Shared = "", more: torch.Tensor | None = None
    ) -> None:
        """out = x, plus `more`, or that times its gate."""
        rows, form = self._rows, combine.Combine(self._form.hidden, 1, how)
        at = {"experts": x, "out": out, "weights": rows.ones, "shared": out if more is None else more}
        at["shared_gate"] = rows.shared_gate
        given = named(combine.FIELDS, pairs=numbered(0), **at)
        self.steps.add(Work(combine.kernel(form), given, self.count, some(self.count)))

    def product(self, weights: Sequence[Weight], x: torch.Tensor, outs: Sequence[torch.Tensor]) -> list[int]:
        """Each of `outs` = x times a weight, all in one step -> where the GIVEN numbers of each are."""
        steps, rows, found = self.steps, len(x), list[int]()
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
            prepared[name] = self._memory.at(name, max(rows, row_steps.MOST) * products.prepared_bytes)
            self.steps.add(products.prepare(x.data_ptr(), x.stride(0) * 4, rows, prepared[name]))
        return prepared[name]
