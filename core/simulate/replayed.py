"""A predictor that replays the predictions recorded with a trace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from core.policy.predict import LayerMap, Prediction, Predictor, View

CERTAIN = 1.0 - 2.0**-30  # a score above has lost its p to rounding


class Replayed(Predictor):
    """Returns the predictions recorded with the trace."""

    starts: ClassVar[bool] = True

    def __init__(self, maps: bool = False) -> None:
        """`maps`: the predictions come from maps of whole layers, which are made up again from them."""
        self._maps = maps
        self._predicted: dict[int, list[Prediction]] = {}
        self._found: list[LayerMap] = []

    def recall(self, ranked: npt.NDArray[Any]) -> None:
        """Sets the recorded predictions of the pass that begins: RANKED, in order."""
        self._predicted = {}
        for _, at, layer, expert, score in ranked.tolist():
            self._predicted.setdefault(at, []).append(Prediction(layer, expert, score))

    def begin(self, view: View) -> Sequence[Prediction]:
        return self.predict(view)

    def predict(self, view: View) -> Sequence[Prediction]:
        predictions = self._predicted.get(view.layer, ())
        if self._maps:
            self._found += [
                _completed(layer, [p for p in predictions if p.layer == layer], view)
                for layer in dict.fromkeys(prediction.layer for prediction in predictions)
            ]
        return predictions

    def take_maps(self) -> Sequence[LayerMap]:
        found, self._found = self._found, []
        return found


def _completed(layer: int, named: Sequence[Prediction], view: View) -> LayerMap:
    """A map's distribution [E] of `layer` as far as its predictions give it: the probability p of the named experts
    from their score 1 - (1 - p)^(k T), and of the others an even share of what is left of 1. A trace holds no more."""
    draws = view.top_k * max(1, len(view.tokens) or len(view.ids))
    p: npt.NDArray[np.float32] = np.zeros(view.experts, np.float32)
    at = [prediction.expert for prediction in named]
    p[at] = [-np.expm1(np.log1p(-min(prediction.score, CERTAIN)) / draws) for prediction in named]
    rest = np.ones(view.experts, np.bool_)
    rest[at] = False
    if rest.any():
        p[rest] = max(0.0, 1.0 - float(p.sum())) / int(rest.sum())
    return LayerMap(layer, p)
