"""Owns the predictor: hooks it to the model, builds its views and calls it. The caller handles its predictions.

Device work is done on the compute thread, in the pass's own stream, and never writes to a tensor of the model.
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
    """One model's predictor. Call `use` and `close` only between two passes, and everything on the compute thread."""

    def __init__(self, model: Any, sites: Sequence[ExpertsSite], shape: ModelShape) -> None:
        self.shape = shape
        self.request = 0  # prompts so far
        self.tokens: Sequence[int] = ()  # ids of the running pass
        self.profile: Profile | None = None
        self.predictor: Predictor = NoPrediction()
        self._model, self._sites = model, tuple(sites)
        self._watch: Watch | None = None
        self._seen: Seen | None = None
        self._begun = False  # `begin` was called for the coming pass
        self._attends = False  # router outputs are needed by others than the predictor
        self._output: tuple[int, RouterOutput] | None = None  # (layer, its router's output) while `_attends`
        self._named: PredictedScores | None = None  # predictions kept for others; None: not needed
        self._predicted: Predicted | None = None
        self.remembers = self._certain = False  # keep predicted routings; they are certain to be computed

    # ------------------------------------------------------------------ lifecycle

    def use(self, name: str, params: Mapping[str, Value], profile: Profile | None) -> None:
        """Switch to another predictor or profile; the profile must contain what the predictor needs."""
        fresh: Predictor = create("predictor", name, params)
        self.close()
        self.profile, self.predictor = profile, fresh
        self._listen()
        task = fresh.task(View(self, -1, (), None, None))
        if task is not None:
            fresh.beside = ProcessWorker(task)

    def close(self) -> None:
        """Stop the predictor and remove its hooks from the model; nothing is predicted until the next `use`."""
        self.predictor.close()
        self.predictor = NoPrediction()
        if self._watch is not None:
            self._watch.remove()
        self._watch = self._seen = self._output = self._predicted = None
        for name in ("estimator", "_defaults"):
            vars(self).pop(name, None)

    def attend(self, *, states: bool, names: bool) -> None:
        """Set whether each router's output (`states`) and the predictions for its layer (`names`) are kept for others,
        whatever the predictor needs. Survives `use`. Between two passes only."""
        self._named = (self._named or PredictedScores(self.shape.experts)) if names else None
        if states != self._attends:
            self._attends = states
            self._listen()

    def remember(self, on: bool, *, certain: bool) -> None:
        """Set whether predictions for each next layer are kept as a routing, with its experts put before all other
        predictions. `certain`: that routing will be computed, whatever the router chooses."""
        self.remembers, self._certain, self._predicted = on, certain, None

    def _listen(self) -> None:
        if self._watch is not None:
            self._watch.remove()
        self._watch = self._seen = self._output = None
        if self.predictor.asks or self._attends:
            self._watch = watch(self._model, self._sites, self._keep, norms=self.predictor.defaults)

    # ------------------------------------------------------------------ within a pass

    def begin(self, tokens: Sequence[int]) -> Sequence[Guess]:
        """Start a pass over `tokens`; returns the predictions for the first layers, if the predictor makes any."""
        self.tokens, self._begun = tokens, True
        if not self.predictor.starts:
            return ()
        return self._noted(self.predictor.begin(View(self, -1, (), None, None)))

    def look(self, layer: int, chosen: Sequence[Sequence[int]], weights: torch.Tensor | None = None) -> Sequence[Guess]:
        """Called when the router of `layer` has chosen: predictions for later layers, best first. `weights` [T, k] as
        the experts get them."""
        if layer == 0:
            self.tokens, self._begun = self.tokens if self._begun else (), False
        if not self.predictor.looks:
            return ()
        seen, self._seen, self._predicted = self._seen, None, None  # frees its tensors after this call
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

    # ------------------------------------------------------------------ for miss handling and speculative execution

    def output(self, layer: int) -> RouterOutput:
        """The output of `layer`'s router, just computed; needs `attend(states=True)`."""
        assert self._output is not None and self._output[0] == layer, "the router watched is not this layer's"
        return self._output[1]

    def named(self, layer: int) -> torch.Tensor:
        """survives rounding below"""
        assert self._named is not None, "nobody attends to what is named"
        return self._named.take(layer, self._model.device)

    @cached_property
    def rules(self) -> tuple[Rule | None, ...]:
        """Each layer's router weighting rule; None where it is unknown."""
        return rules_of(self._model, self._sites)

    def rule(self, layer: int) -> Rule:
        """The rule of `layer`, which must be known: callers check that first."""
        rule = self.rules[layer]
        assert rule is not None, "nothing that needs a rule may be chosen where there is none"
        return rule

    def keep(self, told: Predicted) -> None:
        """Keep the predicted routing of the next layer."""
        self._predicted = told

    def take_predicted(self, layer: int) -> Predicted | None:
        """The predicted routing of `layer`, or None; removes it."""
        told, self._predicted = self._predicted, None
        return told if told is not None and told.layer == layer else None

    # ------------------------------------------------------------------ for views

    def ask(self, of: int, seen: Seen, hidden: torch.Tensor) -> RouterOutput:
        """The output that the router of layer `of` would have for `hidden` [T, H]."""
        return answer(self._sites[of], hidden, seen)

    @torch.no_grad()
    def default(
        self, layer: int, of: int, chosen: Sequence[Sequence[int]], weights: torch.Tensor | None, seen: Seen
    ) -> torch.Tensor | None:
        """[T, H] quasi-hidden state q = Norm_of(r + c * D), D = sum over the chosen experts of weight * default vector,
        c = the factor with which the layer adds its experts' output. None where the layer works differently."""
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
        """The profile's estimator, on the model's device."""
        return estimator_of(self.profile, self._model.device)

    @cached_property
    def _defaults(self) -> torch.Tensor:
        """[L, E, H] fp16 on the host."""
        assert self.profile is not None and self.profile.defaults is not None
        return torch.from_numpy(self.profile.defaults)
