"""Predicts experts drawn at random: the control that every prefetcher must beat."""

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from core.policy.predict.base import Prediction, Predictor, View
from core.policy.predict.ranking import Distance, Width, layer_ahead, limit
from core.settings.registry import register


@register(
    "predictor",
    "random",
    title="Random",
    help="Experts of the next layer, drawn at random, all equally likely. What a prefetcher must beat: what it gains "
    "over this one is knowledge, not the traffic alone.",
    source="control",
)
class RandomPrediction(Predictor):
    """Score: the chance that one of the coming tokens requests an expert, 1 - (1 - k / E)^tokens, the same for all."""

    batches: ClassVar[bool] = True

    def __init__(self, width: Width = 0, distance: Distance = 0) -> None:
        self._random = np.random.default_rng(0)
        self._width, self._distance = width, distance or 1

    def predict(self, view: View) -> Sequence[Prediction]:
        ahead = layer_ahead(view, self._distance)
        tokens = len(view.ids) if ahead > view.layer else 1
        score = 1.0 - (1.0 - view.top_k / view.experts) ** tokens
        drawn = self._random.permutation(view.experts)[: limit(view, ahead, self._width)]
        return [Prediction(ahead, expert, score) for expert in drawn.tolist()]
