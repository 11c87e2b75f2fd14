"""Predictors asked beside the one in use, for the predictor lab: what each would have named, though nothing is fetched.

They are asked in the places where the one in use is, with the same view. None writes to a tensor of the model, so no
answer changes; what asking them takes is counted apart.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np
import torch

from core.hf.discover import ExpertsSite
from core.metrics.record import ShadowPredictions
from core.policy.predict.base import Prediction, Predictor, View, needs_recording
from core.profile import Profile
from core.profile.trace.chunk import BESIDE, beside_map_type
from core.runtime.prediction.predictor_host import PredictorHost, Share
from core.settings.config import Settings
from core.settings.param import Choice
from core.settings.registry import create, variants
from core.types import ModelShape


class Shadows:
    """For one model; asks none until `configure` turns recording on. `configure` and `close` between two passes, and
    everything on the compute thread."""

    def __init__(self, model: Any, sites: Sequence[ExpertsSite], shape: ModelShape) -> None:
        self.on = False
        self._host = PredictorHost(model, sites, shape)
        self._together = Together(())
        self._choices: tuple[Choice, ...] = ()
        self._seconds = 0.0  # that asking them took since `take`

    def configure(self, settings: Settings, profile: Profile | None) -> None:
        """Ask the predictors that these settings and this profile record, from the next pass on."""
        choices = recorded(settings, profile)
        if choices == self._choices and (profile is self._host.profile or not choices):
            return
        self.close()
        if not choices:
            return
        try:
            self._together = Together(choices)
            self._host.install(self._together, profile)
            for predictor in self._together.predictors:
                self._host.employ(predictor)
        except BaseException:
            self.close()
            raise
        self._choices, self.on = choices, True

    def close(self) -> None:
        """Remove them from the model."""
        self._host.close()
        self._choices, self.on = (), False

    @property
    def predictors(self) -> tuple[Predictor, ...]:
        """Those that are asked."""
        return self._together.predictors if self.on else ()

    def announce(self, share: Share) -> None:
        """The coming pass will be over these tokens of a request."""
        with self._timed():
            self._host.announce([share])

    def begin(self, share: Share) -> None:
        """A pass over these tokens of a request begins."""
        with self._timed():
            self._together.clear()
            self._host.begin([share])
            self._host.predict_first()

    def look(self, layer: int, chosen: Sequence[Sequence[int]], weights: torch.Tensor | None) -> None:
        """`layer` computes the experts `chosen` [T][k] with `weights` [T, k]."""
        with self._timed():
            self._host.predict(layer, chosen, weights)

    def arrived(self, at: int) -> None:
        """Answers of their workers have had until now to come while layer `at` was computed."""
        with self._timed():
            self._together.arrived(at)

    def take(self) -> tuple[ShadowPredictions, float]:
        """What each named in the pass that ends, and the seconds that asking them took."""
        seconds, self._seconds = self._seconds, 0.0
        return self._together.named(self._host.shape.experts), seconds

    @contextmanager
    def _timed(self) -> Iterator[None]:
        began_s = time.perf_counter()
        try:
            yield
        finally:
            self._seconds += time.perf_counter() - began_s


class Together(Predictor):
    """Several predictors that are asked as one, and whose predictions are kept and not used. A pass waits for none."""

    asks: ClassVar[bool] = True
    defaults: ClassVar[bool] = True
    starts: ClassVar[bool] = True

    def __init__(self, choices: Sequence[Choice]) -> None:
        self._of = tuple((name, dict(params)) for name, params in choices)
        self.predictors: tuple[Predictor, ...] = tuple(create("predictor", *one) for one in choices)
        self._ranked: list[tuple[int, int, int, int, int, float]] = []
        self._maps: list[tuple[Any, ...]] = []

    def announce(self, view: View) -> None:
        for predictor in self.predictors:
            predictor.announce(view)

    def begin(self, view: View) -> Sequence[Prediction]:
        return self._ask(view.layer, lambda predictor: predictor.begin(view) if predictor.starts else ())

    def predict(self, view: View) -> Sequence[Prediction]:
        return self._ask(view.layer, lambda predictor: predictor.predict(view))

    def arrived(self, at: int) -> Sequence[Prediction]:
        return self._ask(at, lambda predictor: predictor.arrived(at))

    def close(self) -> None:
        for predictor in self.predictors:
            predictor.close()

    def clear(self) -> None:
        """Forget what was named: a pass begins."""
        self._ranked.clear()
        self._maps.clear()

    def named(self, experts: int) -> ShadowPredictions:
        """What they named since `clear`; `experts` = of one layer."""
        return ShadowPredictions(
            self._of, np.array(self._ranked, BESIDE), np.array(self._maps, beside_map_type(experts))
        )

    def _ask(self, at: int, ask: Callable[[Predictor], Sequence[Prediction]]) -> Sequence[Prediction]:
        for by, predictor in enumerate(self.predictors):
            self._ranked += [(by, 0, at, *prediction) for prediction in ask(predictor)]
            self._maps += [(by, 0, at, *found) for found in predictor.take_maps()]
        return ()


def recorded(settings: Settings, profile: Profile | None) -> tuple[Choice, ...]:
    """The predictors that these settings record beside the one in use, with their parameters as set: those of which
    routing alone does not tell what they would have named, as far as `profile` holds what they need."""
    telemetry = settings.telemetry
    if telemetry.recorded != "lab":
        return ()
    return tuple(
        settings.choice("predictor", one.name)
        for one in variants("predictor")
        if needs_recording(one.make) and all(profile is not None and profile.has(part) for part in one.needs)
    )
