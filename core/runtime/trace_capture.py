"""Captures what a trace needs in addition to the routing: token ids, the router's distributions, and the predictions of
the predictor in use and of its shadows.
"""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from core.hf.discover import ExpertsSite
from core.hf.watch import Seen, Watch, watch
from core.policy.predict import LayerMap, Prediction
from core.profile.trace.chunk import RANKED
from core.runtime.batch import Batch
from core.runtime.prediction.shadows import Shadows
from core.types import ModelShape, StepRecord


class TraceCapture:
    """For one model; captures nothing until called. Then `take` adds each pass's data to its step record."""

    def __init__(self, model: Any, sites: Sequence[ExpertsSite], shape: ModelShape) -> None:
        self.shadows = Shadows(model, sites, shape)  # predictors that predict without prefetching
        self._watch_routers: Callable[[], Watch] = lambda: watch(model, sites, self._keep)
        self._layers = len(sites)
        self._watch: Watch | None = None
        self._probs: list[torch.Tensor] = []
        self._tokens: Sequence[int] | None = None
        self._named: list[tuple[int, Sequence[Prediction]]] | None = None  # (layer, predictions); None = not captured
        self._maps: list[tuple[int, LayerMap]] | None = None  # (layer, map); None = the predictor finds none

    def __call__(self, *, probs: bool, ranks: bool, tokens: bool) -> None:
        """Choose what step records contain from the next pass on: distributions (`probs`), predictions and the maps
        they are of (`ranks`), token ids. Call only between two passes."""
        if self._watch is not None:
            self._watch.remove()
        self._watch = self._watch_routers() if probs else None
        self._named = [] if ranks else None
        self._tokens = () if tokens else None
        self._probs.clear()

    @property
    def captures(self) -> bool:
        """Whether step records contain anything of it."""
        return self.watches_routers or self.names or self._tokens is not None or self.shadows.on

    @property
    def watches_routers(self) -> bool:
        """Whether the routers' distributions are captured."""
        return self._watch is not None

    @property
    def names(self) -> bool:
        """Whether predictions are captured."""
        return self._named is not None

    def begin(self, batch: Batch) -> None:
        """Start a pass."""
        self._probs.clear()
        if self._named is not None:
            self._named.clear()
            self._maps = None
        if self._tokens is not None:
            self._tokens = batch.tokens

    def name(self, at: int, predictions: Sequence[Prediction], maps: Sequence[LayerMap] | None) -> None:
        """Capture the predictions made in layer `at`, and the `maps` found since the last ones; None = the predictor
        finds none. What a worker answers is captured where it arrives, so that a replay has it no sooner."""
        if self._named is not None:
            self._named.append((at, predictions))
            if maps is not None:
                self._maps = [*(self._maps or ()), *((at, one) for one in maps)]

    def take(self, step: StepRecord) -> None:
        """End the pass: sets the captured fields of `step`, in the shapes of core.types."""
        if self._watch is not None and len(self._probs) == self._layers:
            step.probs = torch.stack(self._probs).cpu().numpy()
        if self._named is not None:
            step.ranked = ranked_rows(self._named)
            step.maps = None if self._maps is None else [(at, *one) for at, one in self._maps]
        if self.shadows.on:
            step.beside, seconds = self.shadows.take()
            step.record_ms = seconds * 1e3
        if self._tokens is not None and len(self._tokens) == step.tokens:
            step.tok = np.array(self._tokens, np.int32)

    def _keep(self, seen: Seen) -> None:
        if seen.layer == 0:
            self._probs.clear()  # of a pass that was not recorded
        self._probs.append(seen.probs.half())


def ranked_rows(named: Sequence[tuple[int, Sequence[Prediction]]]) -> npt.NDArray[Any]:
    """The predictions made in each layer of one pass, as RANKED rows in their order."""
    sizes = [len(predictions) for _, predictions in named]
    values = chain.from_iterable(chain.from_iterable(predictions for _, predictions in named))
    table = np.fromiter(values, np.float64, 3 * sum(sizes)).reshape(-1, 3)
    rows = np.zeros(len(table), RANKED)
    rows["at"] = np.repeat(np.array([at for at, _ in named], np.int16), sizes)
    rows["layer"], rows["expert"], rows["score"] = table.T
    return rows
