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
    "same tokens and tells the experts of every layer before the pass begins, which waits for it at most as long as "
    "that saves. It runs beside the model.",
    source="ExpertFlow section 3.1",
)
class RoutingPath(Predictor):
    """Predicts all layers before a pass begins, from the tokens it was announced with.

    All layers are named at once, nearest first, so that slots fill in the order of use, as far as there are any
    (ExpertFlow section 3.2): before layer 0, or where the pass did not wait long enough, in the layer that is reached
    when the answer is there. As each layer is reached, the next `distance` layers are named again, for slots that have
    come free.
    """

    asks: ClassVar[bool] = False
    starts: ClassVar[bool] = True
    needs: ClassVar[tuple[str, ...]] = ("path",)

    def __init__(
        self,
        distance: Annotated[
            int,
            Param(
                "How many of the next layers are fetched again as each layer is reached, nearest first: those that "
                "found no slot when all layers were told.",
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
        self._asked = 0  # number of the last search
        self._announced: tuple[int, tuple[int, ...]] | None = None  # its request and tokens, until its pass begins
        self._number = 0  # search of the pass that runs
        self._tokens = 0  # tokens in that pass
        self._answers: dict[int, Singles] = {}  # search -> [L * E], of that pass and later ones
        self._plan: list[list[Prediction]] = []  # by layer, for that pass; empty before its answer is there

    def task(self, view: View) -> WorkerTask:
        return WorkerTask("path", *view.path())

    def announce(self, view: View) -> None:
        coming = view.request, tuple(view.tokens)
        if coming == self._announced:
            return
        self.worker = self.worker or InlineWorker(PathReader(self.task(view)))
        # Anew also when another pass than this one was announced: the reader followed tokens that never came.
        fresh = view.request != self._request or self._announced is not None
        self._asked, self._announced, self._request = self._asked + 1, coming, view.request
        if self.wait is not None:
            self.wait.asked(self._asked, len(view.tokens))
        self.worker.give(asked(self._asked, fresh, view.tokens))

    def begin(self, view: View) -> Sequence[Prediction]:
        self.announce(view)
        self._number, self._tokens, self._announced, self._plan = self._asked, len(view.tokens), None, []
        self._answers = {number: one for number, one in self._answers.items() if number >= self._number}
        if self.patient and self.worker is not None:
            self._hear(self.worker.wait())
        if self.wait is not None:
            self.wait.wait(self._number, self._tokens, self._there)
        return self._name(view)

    def predict(self, view: View) -> Sequence[Prediction]:
        if view.layer == 0 and not view.tokens:  # the model was called directly, not by the engine
            self._number, self._plan = self._asked + 1, []
        return self._name(view)

    def close(self) -> None:
        if self.worker is not None:
            self.worker.close()

    def _there(self) -> bool:
        """Whether this pass's answer is there."""
        if self.worker is not None:
            self._hear(self.worker.take())
        return self._number in self._answers

    def _hear(self, answers: Sequence[bytes]) -> None:
        for answer in answers:
            number, predicted = answered(answer)
            if self.wait is not None:
                self.wait.answered(number)
            if number >= self._number:
                self._answers[number] = predicted

    def _name(self, view: View) -> list[Prediction]:
        ahead = self._distance
        if not self._plan:
            if not self._there():
                return []
            most = min((self._width or view.top_k) * self._tokens, view.experts)
            predicted = self._answers[self._number].reshape(view.layers, view.experts)
            self._plan = [best(layer, row, most, self._floor) for layer, row in enumerate(predicted)]
            ahead = view.layers
        return [prediction for named in self._plan[view.layer + 1 :][:ahead] for prediction in named]
