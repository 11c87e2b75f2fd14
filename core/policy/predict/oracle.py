"""Knows the future: the upper bound for prefetching. For traces only, so it cannot be chosen."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from core.policy.predict.base import Prediction, Predictor, View


class Oracle(Predictor):
    """`passes`: the choices [T, L, k] of all coming passes, in order, as in a trace (core.profile.trace.Chunk.ids cut
    by its sizes). Predicts the experts of the next `distance` layers, nearest first, beyond the end of a pass those of
    the next one, each with score 1."""

    starts = True

    def __init__(self, passes: Iterable[npt.NDArray[Any]], distance: int = 1) -> None:
        self._passes: Iterator[npt.NDArray[Any]] = iter(passes)
        self._distance = distance
        self._now: npt.NDArray[Any] | None = None
        self._next = next(self._passes, None)
        self._begun = False

    def begin(self, view: View) -> Sequence[Prediction]:
        self._turn()
        self._begun = True
        return self._name(view)

    def predict(self, view: View) -> Sequence[Prediction]:
        if view.layer == 0 and not self._begun:
            self._turn()
        self._begun = False
        return self._name(view)

    def _turn(self) -> None:
        self._now, self._next = self._next, next(self._passes, None)

    def _name(self, view: View) -> list[Prediction]:
        predicted: list[Prediction] = []
        for layer in range(view.layer + 1, view.layer + 1 + min(self._distance, view.layers)):
            of = self._now if layer < view.layers else self._next
            if of is not None:
                ids = np.unique(of[:, layer % view.layers])
                predicted += [Prediction(layer % view.layers, expert, 1.0) for expert in ids.tolist()]
        return predicted
