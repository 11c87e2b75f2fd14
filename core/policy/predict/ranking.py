"""Shared by predictors based on earlier routing: which layer to predict, how many of its experts, in which order."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from itertools import repeat
from typing import Annotated, ClassVar

import numpy as np
import numpy.typing as npt

from core.policy.predict.base import Prediction, Predictor, View
from core.settings.param import Param

Floats = npt.NDArray[np.floating]
Ints = npt.NDArray[np.int64]

Width = Annotated[
    int,
    Param(
        "At most this many experts are fetched for a token and layer. 0 = as many as the router selects; where the "
        "whole next layer is fetched, all of them.",
        title="Width",
        low=0,
        high=1024,
        step=1,
        unit="experts",
        shared=True,
    ),
]
Floor = Annotated[
    float,
    Param(
        "Only experts with at least this probability are fetched.",
        title="Least probability",
        low=0.0,
        high=1.0,
        step=0.01,
        shared=True,
    ),
]
Distance = Annotated[
    int,
    Param(
        "How many layers ahead experts are fetched: a larger distance leaves more time, and is harder to predict. "
        "Gate predicts every layer up to it, which costs time for each; routing_path fetches again in "
        "so many next layers what found no slot before. 0 = the prefetcher's own: 4 for stride and routing_path, 3 "
        "for expert_map, 1 for all others.",
        title="Distance",
        low=0,
        high=64,
        step=1,
        unit="layers",
        shared=True,
    ),
]


def reach(view: View, distance: int) -> int:
    """`distance`, but less than a whole token ahead, unless there is only one layer."""
    return max(1, min(distance, view.layers - 1))


def layer_ahead(view: View, distance: int) -> int:
    """The layer `distance` ahead; after the last one, the next token's."""
    return (view.layer + reach(view, distance)) % view.layers


def limit(view: View, layer: int, width: int) -> int:
    """Most experts of `layer` to predict: `width` (0 = top-k) per token that will reach it."""
    tokens = len(view.ids) if layer > view.layer else 1
    return min((width or view.top_k) * tokens, view.experts)


def by_use(uses: Ints, last: Ints) -> Ints:
    """Experts [E] by descending number of uses; ties: the most recently used, then the lower id. `last` < 2**32."""
    return np.argsort(-((uses << 32) + last), kind="stable")


def best(layer: int, scores: Floats, most: int, floor: float = 0.0, order: Ints | None = None) -> list[Prediction]:
    """The first `most` experts of `order` (default: descending score [E]) as predictions; none with a score of 0 or
    below `floor`. `order` must not contradict the scores."""
    chosen = (np.argsort(-scores, kind="stable") if order is None else order)[:most]
    found = scores[chosen]
    kept = int(np.count_nonzero((found > 0.0) & (found >= floor)))  # scores descend, so the rest is no better
    return list(map(Prediction, repeat(layer), chosen[:kept].tolist(), found[:kept].tolist()))


class ExpertUse:
    """How often [L, E] and when last [L, E] each expert was used, counted in tokens [L]; 0 = never."""

    def __init__(self, layers: int, experts: int) -> None:
        self.uses: Ints = np.zeros((layers, experts), np.int64)
        self.last: Ints = np.zeros((layers, experts), np.int64)
        self.tokens = [0] * layers

    @classmethod
    def of(cls, view: View) -> ExpertUse:
        """An empty tally for the model of `view`."""
        return cls(view.layers, view.experts)

    def add(self, layer: int, ids: Ints) -> None:
        """Count the choices [T, k] of `layer`, distinct within a token."""
        before, self.tokens[layer] = self.tokens[layer], self.tokens[layer] + len(ids)
        if len(ids) == 1:
            self.uses[layer, ids[0]] += 1
            self.last[layer, ids[0]] = before + 1
        else:
            self.uses[layer] += np.bincount(ids.ravel(), minlength=self.uses.shape[1])
            np.maximum.at(self.last[layer], ids, np.arange(before + 1, before + 1 + len(ids))[:, None])


class Again:
    """Predicts the last token's experts for the next one, and counts how often that is correct.

    Score: (chosen again + 1) / (predicted + 2), the rule of succession, the same for all experts of a layer; they keep
    their router's order."""

    def __init__(self) -> None:
        self._last: dict[int, list[int]] = {}
        self._named: dict[int, int] = {}
        self._true: dict[int, int] = {}

    def note(self, layer: int, ids: Sequence[Sequence[int]]) -> None:
        """Store the choices [T][k] of a pass."""
        if before := self._last.get(layer):
            self.count(layer, before, ids[0])
        self._last[layer] = list(dict.fromkeys(ids[-1]))

    def count(self, layer: int, named: Sequence[int], chosen: Sequence[int]) -> None:
        """Count how many of the experts predicted for a token were chosen."""
        self._named[layer] = self._named.get(layer, 0) + len(named)
        self._true[layer] = self._true.get(layer, 0) + len({*named}.intersection(chosen))

    def score(self, layer: int) -> float:
        """Probability that a predicted expert is chosen."""
        return (self._true.get(layer, 0) + 1) / (self._named.get(layer, 0) + 2)

    def predictions(self, layer: int, most: int) -> list[Prediction]:
        """The last token's experts in `layer`; none before the first token."""
        score = self.score(layer)
        return [Prediction(layer, expert, score) for expert in self._last.get(layer, ())[:most]]


class NextLayer(Predictor):
    """Predicts the next layer from a distribution over its experts; layer 0, which no layer comes before, takes the
    previous token's."""

    batches: ClassVar[bool] = True
    asks: ClassVar[bool] = True
    executes: ClassVar[bool] = True

    def __init__(self, width: Width = 0, floor: Floor = 0.0) -> None:
        self._width, self._floor = width, floor
        self._first = Again()

    def predict(self, view: View) -> Sequence[Prediction]:
        if view.layer == 0:
            self._first.note(0, view.ids)
        ahead = view.layer + 1
        if ahead == view.layers:
            return self._first.predictions(0, self._width or view.top_k)
        return best(ahead, self._scores(view, ahead), limit(view, ahead, self._width), self._floor)

    @abstractmethod
    def _scores(self, view: View, ahead: int) -> Floats:
        """[E] the distribution of layer `ahead`."""
