"""A predictor that replays the predictions recorded with a trace, each in the layer in which it was there."""

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from core.policy.predict import LayerMap, Prediction, Predictor, View
from core.policy.predict.base import PriorityFormula, by_score
from core.profile.trace import Chunk
from core.profile.trace.chunk import RANKED

Rows = npt.NDArray[Any]
CERTAIN = 1.0 - 2.0**-30  # a score above has lost its p to rounding


class Replayed(Predictor):
    """Returns the predictions recorded with the trace: what came late while it was recorded comes as late again."""

    starts: ClassVar[bool] = True

    def __init__(self, maps: bool = False, by: int | None = None, priority: PriorityFormula = by_score) -> None:
        """`maps`: the predictions come from maps of whole layers. Where a trace does not hold those, they are made up
        again from the predictions. `by`: the place, among the predictors that were recorded besides the one in use, of
        the one to replay; None = the one in use. `priority`: the predictor's order."""
        self._maps, self._by, self.priority = maps, by, priority
        self._chunk: Chunk | None = None  # that the following are of
        self._rows: tuple[Rows | None, Rows | None] = None, None  # its predictions and its maps
        self._predicted: dict[int, list[Prediction]] = {}
        self._recorded: dict[int, list[LayerMap]] | None = None  # None = not in the trace
        self._found: list[LayerMap] = []

    def follow(self, chunk: Chunk, number: int) -> None:
        """Pass `number` of a chunk begins."""
        if chunk is not self._chunk:
            self._chunk, self._rows = chunk, self._of(chunk)
        ranked, maps = ((None if rows is None else rows[rows["of"] == number]) for rows in self._rows)
        self.recall(np.empty(0, RANKED) if ranked is None else ranked, maps)

    def _of(self, chunk: Chunk) -> tuple[Rows | None, Rows | None]:
        if self._by is None:
            return chunk.ranked, chunk.maps
        ranked, maps = (
            None if rows is None else rows[rows["by"] == self._by][[*(rows.dtype.names or ())[1:]]]
            for rows in (chunk.beside, chunk.beside_maps)
        )
        return ranked, maps if self._maps else None

    def recall(self, ranked: npt.NDArray[Any], maps: npt.NDArray[Any] | None = None) -> None:
        """Sets what was recorded of the pass that begins, in order: predictions (RANKED), and maps (map_type)."""
        self._predicted = {}
        for _, at, layer, expert, score in ranked.tolist():
            self._predicted.setdefault(at, []).append(Prediction(layer, expert, score))
        found: dict[int, list[LayerMap]] = {}
        for _, at, layer, distribution in () if maps is None else maps:
            found.setdefault(int(at), []).append(LayerMap(int(layer), distribution))
        self._recorded = None if maps is None else found

    def begin(self, view: View) -> Sequence[Prediction]:
        return self.predict(view)

    def predict(self, view: View) -> Sequence[Prediction]:
        predictions = self._predicted.get(view.layer, ())
        if self._recorded is not None:
            self._found += self._recorded.get(view.layer, ())
        elif self._maps:
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
