"""Keeps a predictor's scores per layer for the substitutes that use them when that layer is reached."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from core.memory.to_device import to_device
from core.policy.predict import Prediction


class PredictedScores:
    """The scores of the latest predictions for each layer, until they are taken."""

    def __init__(self, experts: int) -> None:
        self._experts = experts
        self._scores: dict[int, dict[int, float]] = {}

    def note(self, predictions: Sequence[Prediction]) -> None:
        """Store predictions made together; they replace earlier ones for the same layers."""
        fresh: dict[int, dict[int, float]] = {}
        for layer, expert, score in predictions:
            fresh.setdefault(layer, {})[expert] = score
        self._scores |= fresh

    def take(self, layer: int, device: torch.device) -> torch.Tensor:
        """[E] fp32 on `device`: the score of each expert of `layer`; 0 = not predicted since the last call. Removes the
        scores."""
        scores = self._scores.pop(layer, {})
        row = [0.0] * self._experts
        for expert, score in scores.items():
            row[expert] = score
        return to_device(row, device, torch.float32)
