"""Compares what the latency model predicts for the settings in force with what each answer took."""

from __future__ import annotations

import logging
from pathlib import Path

from app.services.answer_queue import Request
from app.services.plan_basis import Basis
from app.services.predictions import Prediction, keep_prediction
from core.errors import MoestroError
from core.settings.config import Settings
from core.types import StepRecord

log = logging.getLogger("moestro.app")
LEAST = 16  # tokens of an answer that is counted


class Predicting:
    """Of the loaded model, noted at the end of each answer by the thread that writes them."""

    def __init__(self, folder: Path, basis: Basis) -> None:
        self._folder, self._basis = folder, basis
        self._moved = True  # in the middle of the answer, or before it was followed
        self._profile: object = None  # at its beginning

    def on_step(self, request: Request, step: StepRecord) -> None:
        """A pass of an answer."""
        engine = request.model.engine
        profile = engine.profile
        if step.phase == "prefill":
            self._moved, self._profile = not engine.settings.telemetry.enabled, profile
        elif step.changes or profile is not self._profile:
            self._moved = True

    def ended(self, request: Request) -> None:
        """An answer has ended: note it if it is long enough, exact, and under the same settings all through, and if
        there is something to predict from."""
        stats, engine, moved = request.answer.stats, request.model.engine, self._moved
        self._moved = True
        if stats is None or stats.new_tokens < LEAST or not stats.exact or moved or not stats.tpot_ms > 0:
            return
        if engine.profile is None or engine.profile.times is None:
            return
        try:
            known = self._basis.known(fresh=False)
            assert known is not None
            predicted = known.in_force(Settings(request.model.effective)).tpot_ms
        except MoestroError:  # nothing to predict from
            return
        try:
            keep_prediction(self._folder, engine.model_hash, Prediction(predicted, stats.tpot_ms))
        except OSError as error:  # the answer counts more
            log.warning("a prediction could not be kept: %s", error)
