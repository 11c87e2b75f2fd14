"""Owns the predictor: hooks it to the model, builds its views and calls it. The caller handles its predictions.

Device work is done on the compute thread, in the pass's own stream, and never writes to a tensor of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from core.hf.discover import ExpertsSite, RouterOutput
from core.hf.norms import has_quasi_hidden, quasi_hidden
from core.hf.watch import Seen, Watch, answer, watch
from core.hf.weighing import Rule, rules_of
from core.memory.to_device import to_device
from core.policy.predict import Prediction, Predictor
from core.policy.predict.base import Later
from core.policy.predict.nets import estimator
from core.policy.predict.nets.estimator import Estimator
from core.policy.predict.none import NoPrediction
from core.profile import Profile
from core.runtime.prediction.answer_wait import AnswerWait
from core.runtime.prediction.speculation import PredictedRouting, PredictedScores
from core.runtime.prediction.view import EngineView, mean_distribution
from core.runtime.prediction.worker.process_worker import ProcessWorker
from core.runtime.program.routers import Answers
from core.settings.param import Value
from core.settings.prefetch import PrefetchSettings
from core.settings.registry import create
from core.types import ModelShape

Share = tuple[int, Sequence[int]]
"""A request, and its token ids in a pass."""


class PredictorHost:
    """One model's predictor. Call `use` and `close` only between two passes, and everything on the compute thread."""

    def __init__(self, model: Any, sites: Sequence[ExpertsSite], shape: ModelShape) -> None:
        self.shape = shape
        self.request = 0  # of the running pass
        self.tokens: Sequence[int] = ()  # its ids
        self.shares: Sequence[Share] = ()  # ... by request, where it is over several sequences
        self.profile: Profile | None = None
        self.predictor: Predictor = NoPrediction()
        self.answer_wait = AnswerWait()  # of the predictor
        self.on_answer: Callable[[], None] = lambda: None  # called, on another thread, for each answer of its worker
        self._model, self._sites = model, tuple(sites)
        self._watch: Watch | None = None
        self._seen: Seen | None = None
        self._distribution: tuple[int, Later] | None = None  # (layer, its router's), begun before it was asked for
        self._watches = True  # the predictor is asked, and reads what hooks show of the model's routers
        self._answers: tuple[int, Answers] | None = None  # of routers that a program has asked, and in which layer
        self._begun = False  # `begin` was called for the coming pass
        self._keeps_outputs = False  # router outputs are needed by others than the predictor
        self._output: tuple[int, RouterOutput] | None = None  # (layer, its router's output) while `_keeps_outputs`
        self._named: PredictedScores | None = None  # predictions kept for others; None: not needed
        self._predicted: PredictedRouting | None = None
        self.keeps_routing = self._certain = False  # keep predicted routings; they are certain to be computed

    # ------------------------------------------------------------------ lifecycle

    def configure(self, old: PrefetchSettings, new: PrefetchSettings, profile: Profile | None) -> bool:
        """Switch to another predictor or profile, as `use`; True if either is another."""
        anew = new.predictor != old.predictor or profile is not self.profile
        if anew:
            self.use(*new.predictor, profile)
        return anew

    def use(self, name: str, params: Mapping[str, Value], profile: Profile | None) -> None:
        """Switch to another predictor or profile; the profile must contain what the predictor needs."""
        fresh: Predictor = create("predictor", name, params)
        fresh.wait = self.answer_wait = AnswerWait()
        self.install(fresh, profile)
        self.employ(fresh)

    def install(self, predictor: Predictor, profile: Profile | None) -> None:
        """Ask `predictor` from now on, which sees the profile."""
        self.close()
        self.profile, self.predictor = profile, predictor
        self._listen()

    def employ(self, predictor: Predictor) -> None:
        """Start the worker of a predictor that sees the profile installed, if it has one."""
        task = predictor.task(EngineView(self, -1, (), None, None))
        if task is not None:
            predictor.worker = ProcessWorker(task, on_answer=self.on_answer)

    def close(self) -> None:
        """Stop the predictor and remove its hooks from the model; nothing is predicted until the next `use`."""
        self.predictor.close()
        self.predictor = NoPrediction()
        if self._watch is not None:
            self._watch.remove()
        self._watch = self._seen = self._output = self._predicted = self._distribution = None
        for name in ("estimator", "_defaults"):
            vars(self).pop(name, None)

    def enable_outputs(self, *, router: bool, predictions: bool) -> None:
        """Set whether each router's output (`router`) and the `predictions` for its layer are kept for others, whatever
        the predictor needs. Survives `use`. Between two passes only."""
        self._named = (self._named or PredictedScores(self.shape.experts)) if predictions else None
        if router != self._keeps_outputs:
            self._keeps_outputs = router
            self._listen()

    def keep_routing(self, on: bool, *, certain: bool) -> None:
        """Set whether predictions for each next layer are kept as a routing, with its experts put before all other
        predictions. `certain`: that routing will be computed, whatever the router chooses."""
        self.keeps_routing, self._certain, self._predicted = on, certain, None

    def watch_routers(self, on: bool) -> None:
        """Set whether the predictor is asked, and reads the model's routers by hooks, which cost a token of the fast
        arithmetic a return to Python in every layer. Between two passes only."""
        if on != self._watches:
            self._watches = on
            self._listen()

    def _listen(self) -> None:
        if self._watch is not None:
            self._watch.remove()
        self._watch = self._seen = self._output = None
        if (self.predictor.asks and self._watches) or self._keeps_outputs:
            self._watch = watch(self._model, self._sites, self._keep, norms=self._uses_defaults)

    @property
    def _uses_defaults(self) -> bool:
        """Whether the predictor reads quasi-hidden states: itself, or through the profile's estimator."""
        return self.predictor.defaults or ("estimator" in self.predictor.needs and self.estimator.quasi)

    # ------------------------------------------------------------------ within a pass

    def announce(self, shares: Sequence[Share]) -> None:
        """A coming pass will be over these tokens of some requests: the predictor may begin to search."""
        view = EngineView(self, -1, (), None, None)
        (view.request, view.tokens), view.shares = shares[0], shares if len(shares) > 1 else ()
        self.predictor.announce(view)

    def begin(self, shares: Sequence[Share]) -> None:
        """Start a pass over the tokens of some requests."""
        several = len(shares) > 1
        self.request, self.shares = 0 if several else shares[0][0], shares if several else ()
        self.tokens = [token for _, tokens in shares for token in tokens] if several else shares[0][1]
        self._begun = True

    @property
    def keeps_predictions(self) -> bool:
        """Whether predictions are kept for others."""
        return self._named is not None

    @property
    def predicts(self) -> bool:
        """Whether the predictor names anything: within passes, or before them."""
        return self.predictor.starts or self.predictor.looks

    def expected(self, request: int) -> npt.NDArray[np.bool_] | None:
        """[L * E] the experts that the next token of a request is predicted to need; None while that is not known."""
        return self.predictor.expected(request)

    def predict_first(self) -> Sequence[Prediction]:
        """Before the first routing: predictions for the first layers, if the predictor makes any."""
        if not self.predictor.starts:
            return ()
        return self._noted(self.predictor.begin(EngineView(self, -1, (), None, None)))

    def predict(
        self, layer: int, chosen: Sequence[Sequence[int]], weights: torch.Tensor | None = None
    ) -> Sequence[Prediction]:
        """Called when the router of `layer` has chosen: predictions for later layers, best first. `weights` [T, k] as
        the experts get them."""
        if layer == 0:
            self.tokens, self._begun = self.tokens if self._begun else (), False
        if not self.predictor.looks:
            return ()
        seen, self._seen, self._predicted = self._seen, None, None  # frees its tensors after this call
        answers, self._answers = self._answers, None
        known = answers[1] if answers is not None and answers[0] == layer else None
        predictions = self.predictor.predict(EngineView(self, layer, chosen, weights, seen, known))
        if self._predicted is not None:
            predictions = self._predicted.first(predictions, certain=self._certain)
        return self._noted(predictions)

    def answered(self, layer: int, answers: Answers) -> None:
        """A program has asked other routers about one token's state in `layer`, which is predicted from next."""
        self._answers = layer, answers

    def arrived(self, at: int) -> Sequence[Prediction]:
        """Predictions that have come from the predictor's worker while layer `at` is computed, best first."""
        return self._noted(self.predictor.arrived(at))

    def _noted(self, predictions: Sequence[Prediction]) -> Sequence[Prediction]:
        if self._named is not None:
            self._named.note(predictions)
        return predictions

    def _keep(self, seen: Seen) -> None:
        if self.predictor.asks:
            self._seen = seen
        if self.predictor.maps and seen.on_gpu:  # ready when the routing is on the host, which comes after it
            self._distribution = seen.layer, mean_distribution(seen)
        if self._keeps_outputs:
            self._output = seen.layer, seen.output

    # ------------------------------------------------------------------ for miss handling and speculative execution

    def output(self, layer: int) -> RouterOutput:
        """The output of `layer`'s router, just computed; needs `enable_outputs(router=True)`."""
        assert self._output is not None and self._output[0] == layer, "the router watched is not this layer's"
        return self._output[1]

    def predicted_scores(self, layer: int) -> torch.Tensor:
        """[E] fp32 on the model's device: the scores predicted for `layer`, 0 where nothing was; removes them. Needs
        `enable_outputs(predictions=True)`."""
        assert self._named is not None, "predictions are not kept"
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

    def set_predicted(self, routing: PredictedRouting) -> None:
        """Keep the predicted routing of the next layer."""
        self._predicted = routing

    def take_predicted(self, layer: int) -> PredictedRouting | None:
        """The predicted routing of `layer`, or None; removes it."""
        routing, self._predicted = self._predicted, None
        return routing if routing is not None and routing.layer == layer else None

    # ------------------------------------------------------------------ for views

    def distribution(self, seen: Seen) -> Later:
        """[E] softmax of the router's logits, mean over the pass's tokens."""
        early, self._distribution = self._distribution, None
        return early[1] if early is not None and early[0] == seen.layer else mean_distribution(seen)

    def ask(self, of: int, seen: Seen, hidden: torch.Tensor) -> RouterOutput:
        """The output that the router of layer `of` would have for `hidden` [T, H]."""
        return answer(self._sites[of], hidden, seen)

    @torch.no_grad()
    def default(
        self, layer: int, of: int, chosen: Sequence[Sequence[int]], weights: torch.Tensor | None, seen: Seen
    ) -> torch.Tensor | None:
        """[T, H] quasi-hidden state (`core.hf.norms.quasi_hidden`). None where the layer works differently."""
        site, following = self._sites[layer], self._sites[of]
        if seen.residual is None or weights is None or not has_quasi_hidden(site, following):
            return None
        if len(chosen) == 1:
            named, share = list(chosen[0]), weights.float()  # [1, k]
        else:
            named = sorted({expert for row in chosen for expert in row})
            column = {expert: i for i, expert in enumerate(named)}
            at = to_device([[column[expert] for expert in row] for row in chosen], weights.device)
            share = torch.zeros(len(chosen), len(named), device=weights.device)  # [T, n]
            share.scatter_add_(1, at, weights.float())
        vectors = to_device(self._defaults[layer, named], seen.residual.device)  # [n, H]
        return quasi_hidden(site, following, seen.residual, share @ vectors.float())

    @torch.no_grad()
    def embed(self, tokens: Sequence[int]) -> torch.Tensor:
        """[T, H] the embedding layer's output; fires no hooks."""
        layer = self._model.get_input_embeddings()
        ids = to_device(list(tokens), layer.weight.device)
        states: torch.Tensor = layer.forward(ids[None])[0]
        return states

    @cached_property
    def estimator(self) -> Estimator:
        """The profile's estimator, on the model's device."""
        return estimator_of(self.profile, self._model.device)

    @cached_property
    def _defaults(self) -> torch.Tensor:
        """[L, E, H] fp16 on the host."""
        assert self.profile is not None and self.profile.defaults is not None
        return torch.from_numpy(self.profile.defaults)


def estimator_of(profile: Profile | None, device: torch.device) -> Estimator:
    """The profile's estimator in fp32 on `device`; the profile must contain one."""
    assert profile is not None
    return estimator.from_tensors(profile.nets, profile.settings).to(device)
