"""Owns the predictor: what it watches, what it is shown, and when it is asked. Where its guesses go is not known here.

Device work is done on the thread that computes, in the pass's own stream, and never writes to a tensor of the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch

from core.hf.discover import ExpertsSite, RouterOutput
from core.hf.watch import Seen, Watch, answer, norm_of, place_of, watch
from core.hf.weighing import Rule, rules_of
from core.policy.predict import Guess, Predictor
from core.policy.predict.none import NoPrediction
from core.prediction.nets import estimator_of
from core.prediction.predicted import PredictedScores
from core.prediction.speculation import Predicted
from core.prediction.view import View
from core.prediction.worker.process_worker import ProcessWorker
from core.profile import Profile
from core.settings.registry import Value, create
from core.types import ModelShape


class PredictorHost:
    """One model's predictor. `use` and `close` between two passes only; everything on the thread that computes."""

    def __init__(self, model: Any, sites: Sequence[ExpertsSite], shape: ModelShape) -> None:
        self.shape = shape
        self.request = 0  # prompts so far
        self.tokens: Sequence[int] = ()  # ids of the pass that is running
        self.profile: Profile | None = None
        self.predictor: Predictor = NoPrediction()
        self._model, self._sites = model, tuple(sites)
        self._watch: Watch | None = None
        self._seen: Seen | None = None
        self._begun = False  # `begin` was called for the pass that comes
        self._attends = False  # somebody beside the predictor asks what routers answer
        self._output: tuple[int, RouterOutput] | None = None  # (layer, its answer) while somebody does
        self._named: PredictedScores | None = None  # what the predictor named, while somebody asks
        self._predicted: Predicted | None = None
        self.remembers = self._certain = False  # predicted routings are kept; and surely computed

    # ------------------------------------------------------------------ life

    def use(self, name: str, params: Mapping[str, Value], profile: Profile | None) -> None:
        """Take another predictor, or another profile; it must have what the predictor needs."""
        fresh: Predictor = create("predictor", name, params)
        self.close()
        self.profile, self.predictor = profile, fresh
        self._listen()
        task = fresh.task(View(self, -1, (), None, None))
        if task is not None:
            fresh.beside = ProcessWorker(task)

    def close(self) -> None:
        """Stop the predictor and take its hooks out of the model; nothing is predicted until the next `use`."""
        self.predictor.close()
        self.predictor = NoPrediction()
        if self._watch is not None:
            self._watch.remove()
        self._watch = self._seen = self._output = self._predicted = None
        for name in ("estimator", "_defaults"):
            vars(self).pop(name, None)

    def attend(self, *, states: bool, names: bool) -> None:
        """From now on have, or not, what each router answers and what was named for its layer at hand for others,
        whatever the predictor needs. Survives `use`. Between two passes only."""
        self._named = (self._named or PredictedScores(self.shape.experts)) if names else None
        if states != self._attends:
            self._attends = states
            self._listen()

    def remember(self, on: bool, *, certain: bool) -> None:
        """From now on keep, or not, what is predicted of each next layer as a routing, and name its experts before all
        others. `certain`: that routing will be computed, whatever the router says."""
        self.remembers, self._certain, self._predicted = on, certain, None

    def _listen(self) -> None:
        if self._watch is not None:
            self._watch.remove()
        self._watch = self._seen = self._output = None
        if self.predictor.asks or self._attends:
            self._watch = watch(self._model, self._sites, self._keep, norms=self.predictor.defaults)

    # ------------------------------------------------------------------ a pass

    def begin(self, tokens: Sequence[int]) -> Sequence[Guess]:
        """A pass over `tokens` begins; experts of the first layers, if the predictor names any."""
        self.tokens, self._begun = tokens, True
        if not self.predictor.starts:
            return ()
        return self._noted(self.predictor.begin(View(self, -1, (), None, None)))

    def look(self, layer: int, chosen: Sequence[Sequence[int]], weights: torch.Tensor | None = None) -> Sequence[Guess]:
        """The router of `layer` chose; experts of later layers, best first. `weights` [T, k] as the experts get
        them."""
        if layer == 0:
            self.tokens, self._begun = self.tokens if self._begun else (), False
        if not self.predictor.looks:
            return ()
        seen, self._seen, self._predicted = self._seen, None, None  # its tensors live no longer than the look
        guesses = self.predictor.predict(View(self, layer, chosen, weights, seen))
        if self._predicted is not None:
            guesses = self._predicted.first(guesses, certain=self._certain)
        return self._noted(guesses)

    def _noted(self, guesses: Sequence[Guess]) -> Sequence[Guess]:
        if self._named is not None:
            self._named.note(guesses)
        return guesses

    def _keep(self, seen: Seen) -> None:
        if self.predictor.asks:
            self._seen = seen
        if self._attends:
            self._output = seen.layer, seen.output

    # ------------------------------------------------------------------ for what acts between a router and its experts

    def output(self, layer: int) -> RouterOutput:
        """What the router of `layer` has just answered, while somebody attends to states."""
        assert self._output is not None and self._output[0] == layer, "the router watched is not this layer's"
        return self._output[1]

    def named(self, layer: int) -> torch.Tensor:
        """[E] fp32 on the model's device: the probability that the predictor gave each expert of `layer` since it was
        last reached, 0 = not named; while somebody attends to names. Once."""
        assert self._named is not None, "nobody attends to what is named"
        return self._named.take(layer, self._model.device)

    @cached_property
    def rules(self) -> tuple[Rule | None, ...]:
        """How each layer's router weighs its experts; None where that is not known."""
        return rules_of(self._model, self._sites)

    def rule(self, layer: int) -> Rule:
        """The same of a layer where it is known: who needs it has made sure."""
        rule = self.rules[layer]
        assert rule is not None, "nothing that needs a rule may be chosen where there is none"
        return rule

    def keep(self, told: Predicted) -> None:
        """The next layer's routing was predicted."""
        self._predicted = told

    def take_predicted(self, layer: int) -> Predicted | None:
        """What was predicted of `layer`, once."""
        told, self._predicted = self._predicted, None
        return told if told is not None and told.layer == layer else None

    # ------------------------------------------------------------------ for views

    def ask(self, of: int, seen: Seen, hidden: torch.Tensor) -> RouterOutput:
        """What the router of layer `of` would answer, were it given `hidden` [T, H]."""
        return answer(self._sites[of], hidden, seen)

    @torch.no_grad()
    def default(
        self, layer: int, of: int, chosen: Sequence[Sequence[int]], weights: torch.Tensor | None, seen: Seen
    ) -> torch.Tensor | None:
        """[T, H] quasi-hidden state q = Norm_of(r + c * D), D = sum over the chosen experts of weight * default vector,
        c = how much of its experts' output the layer adds. None where that is not how the layer works."""
        scale, norm = place_of(self._sites[layer]).scale, norm_of(self._sites[of])
        if scale is None or norm is None or seen.residual is None or weights is None:
            return None
        if len(chosen) == 1:
            named, share = list(chosen[0]), weights.float()  # [1, k]
        else:
            named = sorted({expert for row in chosen for expert in row})
            column = {expert: i for i, expert in enumerate(named)}
            at = torch.tensor([[column[expert] for expert in row] for row in chosen], device=weights.device)
            share = torch.zeros(len(chosen), len(named), device=weights.device)  # [T, n]
            share.scatter_add_(1, at, weights.float())
        vectors, device = self._defaults[layer, named], seen.residual.device  # [n, H]
        if device.type == "cuda":
            vectors = vectors.pin_memory().to(device, non_blocking=True)
        return norm(seen.residual + (scale * (share @ vectors.float())).to(seen.residual.dtype))

    def embed(self, tokens: Sequence[int]) -> torch.Tensor:
        """[T, H] the embedding layer's output; fires no hooks."""
        layer = self._model.get_input_embeddings()
        ids = torch.tensor(tokens, device=layer.weight.device)
        states: torch.Tensor = layer.forward(ids[None])[0]
        return states

    @cached_property
    def estimator(self) -> Any:
        """The profile's, on the model's device."""
        return estimator_of(self.profile, self._model.device)

    @cached_property
    def _defaults(self) -> torch.Tensor:
        """[L, E, H] fp16 on the host."""
        assert self.profile is not None and self.profile.defaults is not None
        return torch.from_numpy(self.profile.defaults)
