"""A predictor that replays the predictions recorded with a trace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy.typing as npt

from core.policy.predict import Prediction, Predictor, View


class Replayed(Predictor):
    """Returns the predictions recorded with the trace."""

    starts: ClassVar[bool] = True

    def __init__(self) -> None:
        self._predicted: dict[int, list[Prediction]] = {}

    def recall(self, ranked: npt.NDArray[Any]) -> None:
        """Sets the recorded predictions of the pass that begins: RANKED, in order."""
        self._predicted = {}
        for _, at, layer, expert, score in ranked.tolist():
            self._predicted.setdefault(at, []).append(Prediction(layer, expert, score))

    def begin(self, view: View) -> Sequence[Prediction]:
        return self._predicted.get(-1, ())

    def predict(self, view: View) -> Sequence[Prediction]:
        return self._predicted.get(view.layer, ())
