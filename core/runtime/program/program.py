"""A pass over a model on a CPU in the fast arithmetic, as native calls.

The experts of many rows, and those of a few that are not all hits, are computed by the step that transformers' hooks
would call, with the same arguments, so that routing, recording, policies, prefetch and lossy modes are the same in both
arithmetics. Layers of a few rows whose experts are all hits are computed without a return to Python. Hooks on
embeddings, on the norm before a router, on routers and on experts are called as in a pass of transformers.
"""

import time
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from core.memory.codec.fast.products import CanonicalProducts
from core.memory.codec.native.threads import acquire_team
from core.policy.predict.base import RouterPlan
from core.runtime.batch import Batch
from core.runtime.kv_cache import KVCache
from core.runtime.program.bind import Form
from core.runtime.program.build import Builder
from core.runtime.program.built import Built, Memory, Routing, Rows
from core.runtime.program.called import Experts, called
from core.runtime.program.cap import capped
from core.runtime.program.experts import ExpertKernels
from core.runtime.program.feed_forward import Routed
from core.runtime.program.mixer import Text
from core.runtime.program.routers import Answers
from core.runtime.program.texts import texts_of

CPU = torch.device("cpu")
KEPT, LONG = 16, 64  # kinds of passes whose steps are kept, of up to so many rows; of longer ones the last alone


class Hits(Protocol):
    """The experts in slots, in a pass over a few tokens in which a layer whose experts all are there asks for nothing
    else, or over one token for no more than what other routers would choose."""

    @property
    def routers(self) -> RouterPlan | None:
        """The other routers that are asked; None = none are."""

    def hits_at(self) -> int:
        """The address of the addresses of their slots, i64 by eid, 0 for all others; 0 = layers ask for more. With
        `routers` it depends on what was asked for since."""

    def answered(self, layer: int, answers: Answers) -> None:
        """What `routers` would choose, given the router input of the layer that is computed next."""

    def computed(self, first: int, chosen: Sequence[list[list[int]]]) -> None:
        """Layers from the `first` on were computed, whose chosen experts [T][k] all were there."""


class Program:
    """For one model. One pass at a time."""

    def __init__(self, form: Form, kernels: Sequence[ExpertKernels]) -> None:
        """`kernels`: those of each MoE layer's experts."""
        self.form, self.kernels = form, kernels
        self._parts, self._memory = self.form.parts, Memory()
        self._kept: dict[object, Built] = {}
        self._latest: Built | None = None
        self._holding: KVCache | None = None  # whose states the latest pass has left as they were
        self.built_s = 0.0  # what building steps has taken, within passes

    @torch.inference_mode()
    def compute(
        self,
        batch: Batch,
        keep: int,
        experts: Experts,
        hits: Hits | None = None,
        embedded: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As `core.runtime.batch.compute` -> logits [keep * shares, V] in fp32. `hits`: where experts may be found
        without `experts`. `embedded` [T, H] takes the place of the tokens' embeddings. Of a decode pass with logits of
        several rows, some may be taken back (`KVCache.take_back`)."""
        form = self.form
        if self._holding is not None:  # by memory that this pass writes anew
            self._holding.settle()
            self._holding = None
        with texts_of(form, self._parts, batch, keep, CPU) as (positions, texts):
            plan = hits.routers if hits is not None and len(batch.tokens) == 1 else None
            built = self._built(texts, plan, batch.phase == "decode" and keep > 1 and len(texts) == 1)
            first = self._begin(built, batch.tokens, positions, embedded)
            logits = torch.empty(len(built.normed), form.head.outputs)
            built.steps.change(built.logits, [logits.data_ptr()])
            self._run(built, first, experts, hits)
            self._latest = built
        if built.holds:
            self._holding = texts[0].kv.memory
            self._holding.hold(len(batch.tokens), built.settle)
        if form.logits_scale != 1:
            logits.mul_(form.logits_scale)
        if form.logits_cap:
            capped(logits, form.logits_cap)
        return logits

    def states(self) -> torch.Tensor:
        """[T, H] fp32: the residual stream of all rows of the latest pass, after the last layer. The next pass may
        overwrite it."""
        built, form = self._latest, self.form
        assert built is not None
        if len(built.kept) == 1 and not built.kept[0].start:  # all are kept
            return built.rows.x
        states = torch.add(built.rows.x, built.rows.delta, alpha=form.residual_scale)
        if form.layers[-1].factor is not None:
            states.mul_(form.layers[-1].factor)
        for rows in built.kept:  # which have it already
            states[rows] = built.rows.x[rows]
        return states

    @property
    def normed(self) -> torch.Tensor:
        """[kept, H] fp32: what the logits of the latest pass were computed of."""
        assert self._latest is not None
        return self._latest.normed

    def _begin(
        self, built: Built, tokens: Sequence[int], positions: Sequence[int], embedded: torch.Tensor | None
    ) -> int:
        """Write the tokens of all rows and their positions -> the first step: that of the embeddings, unless hooks want
        to see these."""
        form, rows = self.form, built.rows
        built.steps.change(built.tokens, tokens)
        built.steps.change(built.positions, positions)
        if embedded is not None:
            rows.x.copy_(embedded)
            return built.embedded
        if not (form.embedding._forward_hooks or form.embedding._forward_pre_hooks):
            return 0
        rows.x.copy_(form.embedding(torch.tensor([tokens]))[0])
        if form.embedding_scale != 1:
            rows.x.mul_(form.embedding_scale)
        return built.embedded

    def _run(self, built: Built, done: int, experts: Experts, hits: Hits | None) -> None:
        """Compute all layers and the logits; `done`: steps that are not needed."""
        steps, table = built.steps, 0
        found = hits if hits is not None and built.looks and not any(built.hooks) else None
        at = 0  # of the routings
        while at < len(built.routings):
            begin = at
            if found is not None and (not at or found.routers is not None):
                table = found.hits_at()
                steps.change(built.table, [table])
            done = _computed(built, done, None if table else built.routings[at].routed)
            while at < len(built.routings) and done > built.routings[at].looked:
                at += 1
            if at > begin and hits is not None:
                hits.computed(built.routings[begin].rest.site.index, built.chosen(begin, at))
            if at < len(built.routings):
                routing = built.routings[at]
                if hits is not None and routing.answers is not None:
                    hits.answered(routing.rest.site.index, routing.answers)
                built.rows.delta.copy_(self._experts(routing, built.rows, experts))
                done, at = routing.end, at + 1
        if done < built.end:
            _computed(built, done, None)

    def _experts(self, routing: Routing, rows: Rows, experts: Experts) -> torch.Tensor:
        """What the experts of a layer add to the residual stream."""
        routed = routing.logits, routing.ids, routing.weights
        return called(routing.layer, routing.rest, self.form.dtype, (rows.x, rows.normed), routed, experts)

    def products(self) -> Iterator[CanonicalProducts]:
        """Of the model's dense layers."""
        for layer in self.form.layers:
            dense = layer.dense
            for weight in (*layer.mixer.weights, *((*dense.first, dense.down) if dense is not None else ())):
                yield weight.products
        yield self.form.head.products

    @property
    def asks(self) -> bool:
        """Whether it asks other routers about a layer's state."""
        rests = [layer.rest for layer in self.form.layers if isinstance(layer.rest, Routed)]
        return len({(one.route.experts, one.route.chosen) for one in rests}) == 1 and not any(
            one.beside is not None for one in rests
        )

    def _built(self, texts: Sequence[Text], plan: RouterPlan | None, holds: bool) -> Built:
        """The steps of a pass: those of the last few kinds are kept."""
        key = plan, holds, *[(rows, kept, tuple([one.positions for one in held])) for _, held, rows, kept in texts]
        built = self._kept.pop(key, None)
        if built is None:
            began_s = time.perf_counter()
            moved = self._memory.moved
            built = Builder(self.form, self.kernels, self._memory, texts, plan, holds).built
            if moved != self._memory.moved:
                self._kept.clear()
                built = Builder(self.form, self.kernels, self._memory, texts, plan, holds).built
            self.built_s += time.perf_counter() - began_s
        built.bind(texts)
        self._kept[key] = built  # as the last one
        if len(self._kept) > (KEPT if len(built.rows.x) <= LONG else 1):
            self._kept.pop(next(iter(self._kept)))
        return built


def _computed(built: Built, first: int, end: int | None) -> int:
    """Compute some of the steps -> as `Steps.run`."""
    with acquire_team() as team:
        return built.steps.run(team, first, built.end if end is None else end)
