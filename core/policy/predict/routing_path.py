"""ExpertFlow: a small network reads the same tokens as the model and predicts the experts of all layers at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar

import numpy as np
import numpy.typing as npt

from core.policy.predict.base import Prediction, Predictor, View
from core.policy.predict.path_reader import PathReader, answered, asked
from core.policy.predict.ranking import Floor, Width, best
from core.policy.predict.worker import AsyncWorker, InlineWorker, WorkerTask
from core.settings.param import Param
from core.settings.registry import register

Singles = npt.NDArray[np.float32]


@register(
    "predictor",
    "routing_path",
    title="Routing path",
    help="A small network, trained on this model, reads the "
    "same tokens and tells the experts of every layer before the pass reaches them. It runs beside the model.",
    source="ExpertFlow section 3.1",
)
class RoutingPath(Predictor):
    """Predicts all layers as a pass begins; the result is used from the layer on that is reached when it arrives.

    When a layer is reached, the experts of the next `distance` layers are predicted, nearest first, so that the cache
    fills in the order of use (ExpertFlow section 3.2).
    """

    asks: ClassVar[bool] = False
    starts: ClassVar[bool] = True
    needs: ClassVar[tuple[str, ...]] = ("path",)

    def __init__(
        self,
        distance: Annotated[
            int,
            Param(
                "How many of the next layers to fetch at a time, nearest first.",
                title="Layers ahead",
                low=1,
                high=64,
                step=1,
                unit="layers",
            ),
        ] = 4,
        width: Width = 0,
        floor: Floor = 0.0,
    ) -> None:
        self._distance, self._width, self._floor = distance, width, floor
        self.worker: AsyncWorker | None = None
        self._request: int | None = None
        self._number = 0  # of the pass
        self._tokens = 0  # tokens in the pass
        self._predicted: tuple[int, Singles] | None = None

    def task(self, view: View) -> WorkerTask:
        return WorkerTask("path", *view.path())

    def begin(self, view: View) -> Sequence[Prediction]:
        self.worker = self.worker or InlineWorker(PathReader(self.task(view)))
        self._number, self._tokens = self._number + 1, len(view.tokens)
        fresh, self._request = view.request != self._request, view.request
        self.worker.give(asked(self._number, fresh, view.tokens))
        return self._name(view)

    def predict(self, view: View) -> Sequence[Prediction]:
        if view.layer == 0 and not view.tokens:  # the model was called directly, not by the engine
            self._number += 1
        return self._name(view)

    def close(self) -> None:
        if self.worker is not None:
            self.worker.close()

    def _name(self, view: View) -> list[Prediction]:
        if self.worker is not None:
            for answer in self.worker.wait() if self.patient else self.worker.take():
                number, predicted = answered(answer)
                self._predicted = number, predicted.reshape(view.layers, view.experts)
        if self._predicted is None or self._predicted[0] != self._number:
            return []
        most = min((self._width or view.top_k) * self._tokens, view.experts)
        ahead = range(view.layer + 1, min(view.layer + 1 + self._distance, view.layers))
        return [
            prediction for layer in ahead for prediction in best(layer, self._predicted[1][layer], most, self._floor)
        ]
