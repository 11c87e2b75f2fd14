"""Inputs of eviction policies from predictors and profiles, with defaults where there are none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
UNLIKELY = 1e-6  # lowest probability used: 1 / p and p x f stay finite


class Hints:
    """One value per expert, by eid [layers * experts]; predictors and profiles update them between layers.

    `probability`: that the expert is requested when its layer is reached next, in [UNLIKELY, 1]; 1 = no prediction.
    `predicted`: whether a predictor named it for when its layer is reached next.
    `usual`: how often a profile saw it, in any unit; 0 = no profile. `pinned`: evicted last of all.
    """

    def __init__(self, layers: int, experts: int) -> None:
        size = layers * experts
        self.layers, self.experts = layers, experts
        self._told: set[int] = set()
        self.version = 0  # increases with every change
        self.probability: Floats = np.ones(size)
        self.predicted: npt.NDArray[np.bool_] = np.zeros(size, np.bool_)
        self.usual: Floats = np.zeros(size)
        self.pinned: npt.NDArray[np.bool_] = np.zeros(size, np.bool_)

    def tell(self, layer: int, probability: npt.ArrayLike, width: int) -> None:
        """Set a predictor's distribution [E] over the experts of `layer`; the `width` likeliest count as predicted."""
        part = self._part(layer)
        probabilities: Floats = np.asarray(probability, np.float64)
        self.probability[part] = np.clip(probabilities, UNLIKELY, 1.0)
        self.predicted[part] = False
        self.predicted[part.start + np.argsort(-probabilities, kind="stable")[:width]] = True

    def name(self, predictions: Sequence[tuple[int, int, float]]) -> None:
        """Set predictions as (layer, expert, probability); other experts of the same layers become unlikely."""
        for layer in {layer for layer, _, _ in predictions}:
            part = self._part(layer)
            self.probability[part], self.predicted[part] = UNLIKELY, False
        for layer, expert, score in predictions:
            eid = layer * self.experts + expert
            self.probability[eid], self.predicted[eid] = min(1.0, max(UNLIKELY, score)), True

    def profile(self, usual: npt.ArrayLike, pinned: Sequence[int] = ()) -> None:
        """Set how often a profile saw each expert [layers * experts], and the eids to pin."""
        self.usual[:], self.pinned[:] = np.asarray(usual), False
        self.pinned[list(pinned)] = True
        self.version += 1

    def filling(self) -> list[int]:
        """All eids in the order in which they fill a fresh cache: every layer's most often used expert first."""
        best = np.argsort(-self.usual.reshape(self.layers, self.experts), 1, kind="stable")
        order: list[int] = (best + np.arange(self.layers)[:, None] * self.experts).T.ravel().tolist()
        return order

    def reached(self, layer: int) -> None:
        """The routing of `layer` is known: resets its hints, which are now outdated."""
        if layer in self._told:
            part = self._part(layer)
            self.probability[part], self.predicted[part] = 1.0, False
            self._told.remove(layer)
            self.version += 1

    def _part(self, layer: int) -> slice:
        self._told.add(layer)
        self.version += 1
        return slice(layer * self.experts, (layer + 1) * self.experts)

    def repeated(self, copies: int) -> dict[str, npt.NDArray[Any]]:
        """Every array, repeated for each of several caches; the same array object for one."""
        arrays = vars(self).items()
        return {n: a if copies == 1 else np.tile(a, copies) for n, a in arrays if isinstance(a, np.ndarray)}
