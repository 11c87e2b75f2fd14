"""Predicts which experts later layers need, and prefetches them into the cache."""

import threading
import time
from collections.abc import Sequence

import torch

from core.cache.expert_cache import ExpertCache
from core.policy.predict import Prediction
from core.policy.predict.base import RouterPlan
from core.policy.throttle import Throttle
from core.runtime.batch import Batch
from core.runtime.prediction.predictor_host import PredictorHost, Share
from core.runtime.program.routers import Answers
from core.runtime.step_sink import StepSink
from core.runtime.trace_capture import TraceCapture


class Prefetcher:
    """For one model. Predictions are made within a pass, on the compute thread; while `throttle` pauses prefetching,
    only those that will be executed are made.

    Answers of the predictor's worker prefetch as they arrive, on the thread that hears of them, while the compute
    thread leaves the cache alone: from `leave_cache` to `take_cache`. Between the two it holds `cache_lock` whenever it
    uses the cache. Answers that arrive at other times wait for the next `leave_cache`, or call of the predictor.
    """

    def __init__(
        self,
        expert_cache: ExpertCache,
        predictor_host: PredictorHost,
        throttle: Throttle,
        sink: StepSink,
        capture: TraceCapture,
        first: int = 0,
    ) -> None:
        """`first`: the first layer that the predictor sees; those before it are an encoder's, for whose passes nothing
        is predicted."""
        self._expert_cache, self._predictor_host, self._throttle = expert_cache, predictor_host, throttle
        self._sink, self._capture, self._first = sink, capture, first
        self._several = self._idle = False  # the running pass: of several sequences; nothing is predicted in it
        self.active = True  # something is predicted layer by layer in it
        self.program_asks = False  # what computes passes over one token asks routers for the predictor
        self.routers: RouterPlan | None = None  # ... in the running pass
        self.cache_lock = threading.Lock()
        self._at: int | None = None  # the layer that is computed while the compute thread leaves the cache alone
        self._failure: Exception | None = None  # of a prefetch on the other thread
        predictor_host.on_answer = self._on_answer

    def announce(self, shares: Sequence[Share]) -> None:
        """Coming passes will be over these tokens of some requests: what is predicted from them alone is begun at
        once."""
        predictor = self._predictor_host.predictor
        if predictor.starts and not self._throttle.paused and (len(shares) == 1 or (shares and predictor.batches)):
            began_s = time.perf_counter()
            self._predictor_host.announce(shares)
            self._sink.predicted(time.perf_counter() - began_s)
        if self._capture.shadows.on:
            for share in shares:
                self._capture.shadows.announce(share)

    def begin(self, batch: Batch) -> None:
        """A pass begins: prefetch what the predictor names before the first routing. In a pass over several sequences
        only predictors predict that keep nothing of any of them."""
        share, self._several = batch.shares[0], len(batch.shares) > 1
        predictor, shadows = self._predictor_host.predictor, self._capture.shadows.on
        self._idle = self._several and not predictor.batches
        if self._first and share.kv is not None and not share.kv.length:
            self._idle, self.active, self.routers = True, False, None
            return
        asked = self._predictor_host.keeps_routing or not self._throttle.paused
        self.routers = self._plan(batch) if asked else None
        self._predictor_host.watch_routers(asked and self.routers is None)
        self.active = not self._idle and ((predictor.looks and asked) or shadows)
        if self._predictor_host.predicts:
            self._predictor_host.begin([(one.request, one.tokens) for one in batch.shares])
        if predictor.starts and not self._throttle.paused and not self._idle:
            began_s = time.perf_counter()
            self._fetch(self._predictor_host.predict_first(), -1)
            self._sink.predicted(time.perf_counter() - began_s)
        if shadows and not self._several:
            self._capture.shadows.begin((share.request, share.tokens))

    def fetch_for_draft(self, predictions: Sequence[Prediction]) -> None:
        """The pass that begins verifies guesses, which are foretold to need these: prefetch them, whoever else
        does."""
        began_s = time.perf_counter()
        self._expert_cache.prefetch(predictions, -1, (), self._predictor_host.predictor.priority, for_draft=True)
        self._sink.predicted(time.perf_counter() - began_s)

    def _plan(self, batch: Batch) -> RouterPlan | None:
        """The routers that a program asks in a pass; None: the predictor asks them, or needs more than them."""
        known, plan = self.program_asks and not self._first, self._predictor_host.predictor.routers
        if plan is None or not known or batch.size > 1 or plan.width > self._predictor_host.shape.top_k:
            return None
        return None if self._predictor_host.keeps_routing else plan

    @property
    def skips(self) -> bool:
        """Whether layers of the running pass, whose predictions would fetch nothing, need not `look_ahead`: then
        `passed` is called for them."""
        observed = self._capture.shadows.on or self._capture.names or self._predictor_host.keeps_predictions
        return self.routers is not None and not observed and not self._expert_cache.policy.uses_hints

    def answered(self, layer: int, answers: Answers) -> None:
        """A program has asked `routers` about the state of `layer`, which looks ahead next."""
        self._predictor_host.answered(layer, answers)

    def passed(self, first: int, chosen: Sequence[Sequence[int]]) -> None:
        """One token's layers from the `first` on were computed, with the experts `chosen`."""
        for layer, ids in enumerate(chosen, first):
            self._predictor_host.predictor.passed(layer, ids)

    def look_ahead(self, layer: int, chosen: Sequence[Sequence[int]], weights: torch.Tensor | None) -> None:
        """`layer` computes the experts `chosen` [T][k] with `weights` [T, k]: predict for later layers."""
        if not self.active:
            return
        paused = self._throttle.paused
        if self._predictor_host.predictor.looks and (self._predictor_host.keeps_routing or not paused):
            began_s = time.perf_counter()
            predictions = self._predictor_host.predict(layer - self._first, chosen, weights)
            if not paused:
                self._fetch(predictions, layer)
            self._sink.predicted(time.perf_counter() - began_s)
        if self._capture.shadows.on and not self._several:
            self._capture.shadows.look(layer, chosen, weights)

    @property
    def hears(self) -> bool:
        """Whether a worker's answers may arrive within a pass."""
        return self._predictor_host.predictor.worker is not None or self._capture.shadows.on

    def leave_cache(self, at: int) -> None:
        """The compute thread does not use the cache until `take_cache`; it computes layer `at` (-1: what is before the
        first)."""
        began_s = time.perf_counter()
        with self.cache_lock:
            self._fetch_arrived(at)
            self._at = at
        if self._predictor_host.predictor.worker is not None:
            self._sink.predicted(time.perf_counter() - began_s)

    def take_cache(self) -> None:
        """The compute thread uses the cache again. Raises what a prefetch raised on the other thread."""
        with self.cache_lock:
            at, self._at = self._at, None
            failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        if at is not None and self._capture.shadows.on and not self._several:
            self._capture.shadows.arrived(at)

    def _on_answer(self) -> None:
        with self.cache_lock:
            if self._at is not None and self._failure is None:
                try:
                    self._fetch_arrived(self._at)
                except Exception as error:
                    self._failure = error

    def _fetch_arrived(self, at: int) -> None:
        host = self._predictor_host
        if host.predictor.worker is not None and not self._throttle.paused:
            self._fetch(host.arrived(at - self._first if at >= 0 else at), at, again=True)

    def _fetch(self, predictions: Sequence[Prediction], at: int, *, again: bool = False) -> None:
        """`again`: nothing is to be done unless something new is known in this layer."""
        predictor = self._predictor_host.predictor
        maps = predictor.take_maps()
        if again and not predictions and not maps:
            return
        if self._first:
            predictions = [one._replace(layer=one.layer + self._first) for one in predictions]
        self._capture.name(at, predictions, maps if predictor.maps else None)
        self._expert_cache.prefetch(predictions, at, maps, predictor.priority)
