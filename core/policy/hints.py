"""Inputs of eviction policies from predictors and profiles, with defaults where there are none."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
UNLIKELY = 1e-6  # lowest probability used: p x f still ranks by f where p is nothing


class Hints:
    """One value per expert, by eid [layers * experts]; predictors and profiles update them between layers.

    `probability`: the router probability in the newest map that spoke of its layer, in [UNLIKELY, 1]; before any did,
    its share of the layer's uses in the profile, or 1 / E without one. Stays when the layer is reached. `predicted`:
    whether a predictor named it for when its layer is reached next. `usual`: how often a profile saw it, in any unit; 0
    = no profile. `pinned`: evicted last of all."""

    def __init__(self, layers: int, experts: int) -> None:
        size = layers * experts
        self.layers, self.experts = layers, experts
        self._named: set[int] = set()  # layers with predictions
        self._mapped: set[int] = set()  # layers that a map spoke of
        self.version = 0  # increases with every change
        self.probability: Floats = np.full(size, max(UNLIKELY, 1.0 / experts))
        self.predicted: npt.NDArray[np.bool_] = np.zeros(size, np.bool_)
        self.usual: Floats = np.zeros(size)
        self.pinned: npt.NDArray[np.bool_] = np.zeros(size, np.bool_)

    def tell(self, layer: int, distribution: npt.ArrayLike) -> None:
        """A map speaks of `layer`: the router probabilities [E] of all its experts, kept until a newer one does."""
        self.probability[self._part(layer)] = np.clip(np.asarray(distribution, np.float64), UNLIKELY, 1.0)
        self._mapped.add(layer)
        self.version += 1

    def name(self, predictions: Sequence[tuple[int, int, float]]) -> None:
        """Set predictions as (layer, expert, score); other experts of the same layers count as not predicted."""
        for layer in {layer for layer, _, _ in predictions}:
            self.predicted[self._part(layer)] = False
            self._named.add(layer)
        for layer, expert, _ in predictions:
            self.predicted[layer * self.experts + expert] = True
        self.version += 1

    def profile(self, usual: npt.ArrayLike, pinned: Sequence[int] = ()) -> None:
        """Set how often a profile saw each expert [layers * experts], and the eids to pin."""
        self.usual[:], self.pinned[:] = np.asarray(usual), False
        self.pinned[list(pinned)] = True
        for layer in set(range(self.layers)) - self._mapped:
            part = self._part(layer)
            total = self.usual[part].sum()
            share = self.usual[part] / total if total else 1.0 / self.experts
            self.probability[part] = np.maximum(share, UNLIKELY)
        self.version += 1

    def filling(self) -> list[int]:
        """All eids in the order in which they fill a fresh cache: every layer's most often used expert first."""
        best = np.argsort(-self.usual.reshape(self.layers, self.experts), 1, kind="stable")
        order: list[int] = (best + np.arange(self.layers)[:, None] * self.experts).T.ravel().tolist()
        return order

    def reached(self, layer: int) -> None:
        """The routing of `layer` is known: its predictions are now outdated, a map of it is not."""
        if layer in self._named:
            self.predicted[self._part(layer)] = False
            self._named.remove(layer)
            self.version += 1

    def forget(self) -> None:
        """Forget all predictions and maps, as if no pass had been computed."""
        self.predicted[:] = False
        self._named.clear()
        self._mapped.clear()
        self.profile(self.usual.copy(), np.flatnonzero(self.pinned).tolist())

    def _part(self, layer: int) -> slice:
        return slice(layer * self.experts, (layer + 1) * self.experts)

    def repeated(self, copies: int) -> dict[str, npt.NDArray[Any]]:
        """Every array, repeated for each of several caches; the same array object for one."""
        arrays = vars(self).items()
        return {n: a if copies == 1 else np.tile(a, copies) for n, a in arrays if isinstance(a, np.ndarray)}
