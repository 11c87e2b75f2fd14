"""FineMoE: predicts that this pass continues like the earlier pass that began most alike."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Annotated, ClassVar

from core.policy.predict.base import Later, LayerMap, Prediction, Predictor, View
from core.policy.predict.map_search import MapSearch, followed, opened, read
from core.policy.predict.ranking import Distance
from core.policy.predict.worker import AsyncWorker, InlineWorker, WorkerTask
from core.settings.param import Param
from core.settings.registry import register

DISTANCE = 3  # layers ahead, unless another one is set
BEHIND = 2  # passes that the search may be behind; later ones are skipped


@register(
    "predictor",
    "expert_map",
    title="Expert maps",
    help="It remembers what all routers said for earlier "
    "tokens, searches the one whose embedding, and then whose layers so far, are most like this token's, and "
    "fetches what that one used next. Searching never holds up a layer.",
    source="FineMoE sections 4.1 to 4.4",
)
class ExpertMap(Predictor):
    """Layers [0, d) by embedding, as the pass begins; layer l >= d by the trajectory of layers [0, l - d], as soon as
    layer l - d is routed. So every layer is searched for exactly once. The store starts with the profile's maps.

    The map of a pass over several tokens is their mean. Predictions are ordered by p / (l - l_now). The result of a
    search is used at the next layer that is reached; layer 0's comes too late, unless it is waited for (`patient`).
    Eviction is told the whole map of a layer, also when it comes too late to prefetch by (section 4.5).
    """

    asks: ClassVar[bool] = True
    starts: ClassVar[bool] = True
    maps: ClassVar[bool] = True

    def __init__(
        self,
        distance: Distance = 0,
        capacity: Annotated[
            int,
            Param(
                "How many maps to remember; a full store gives up the one most like the new one.",
                title="Maps",
                low=8,
                high=32000,
                step=8,
                unit="maps",
            ),
        ] = 1000,
        semantic: Annotated[
            bool, Param("Search by embedding for the first layers. Off: they are not guessed.", title="By embedding")
        ] = True,
        dynamic: Annotated[
            bool,
            Param(
                "Fetch more experts the less alike the map that was found is. "
                "Off: always as many as the router selects.",
                title="As many as it takes",
            ),
        ] = True,
        learn: Annotated[
            bool, Param("Add every token's map to the store. Off: only the profile's are searched.", title="Learn")
        ] = True,
    ) -> None:
        self._predicted = {
            "distance": distance or DISTANCE,
            "capacity": capacity,
            "semantic": int(semantic),
            "dynamic": int(dynamic),
            "learn": int(learn),
        }
        self.worker: AsyncWorker | None = None
        self._number = 0  # of the pass
        self._begun = self._skipped = False
        self._maps: list[LayerMap] = []
        self._ahead: deque[tuple[bytes, Later]] = deque()  # messages whose values the device is still computing

    def task(self, view: View) -> WorkerTask:
        known = view.profile
        arrays = (
            {"maps": known.maps, "map_keys": known.map_keys}
            if known is not None and known.maps is not None and known.map_keys is not None
            else {}
        )
        return WorkerTask(
            "maps", {**self._predicted, "layers": view.layers, "experts": view.experts, "top_k": view.top_k}, arrays
        )

    def begin(self, view: View) -> Sequence[Prediction]:
        worker, self._begun = self._start(view), True
        if not self._skipped:
            self._ahead.append((opened(self._number, len(view.tokens)), view.embedding()))
        return self._collect(worker, view)

    def predict(self, view: View) -> Sequence[Prediction]:
        if view.layer == 0 and not self._begun:  # the model was called directly, not by the engine
            worker = self._start(view)
            worker.give(opened(self._number, len(view.ids)))
        self._begun = False
        assert self.worker is not None
        if not self._skipped:
            self._ahead.append((followed(self._number, view.layer), view.distribution()))
        return self._collect(self.worker, view)

    def take_maps(self) -> Sequence[LayerMap]:
        found, self._maps = self._maps, []
        return found

    def close(self) -> None:
        if self.worker is not None:
            self.worker.close()

    def _start(self, view: View) -> AsyncWorker:
        """Start a new pass."""
        self.worker = self.worker or InlineWorker(MapSearch(self.task(view)))
        self._number += 1
        self._skipped = self.worker.behind > BEHIND * view.layers
        return self.worker

    def _collect(self, worker: AsyncWorker, view: View) -> list[Prediction]:
        """The results so far for layers still ahead, by descending p / (l - l_now)."""
        while self._ahead and (self.patient or self._ahead[0][1].ready()):
            head, later = self._ahead.popleft()
            worker.give(head + later().astype("<f4", copy=False).tobytes())
        found = [one for answer in (worker.wait() if self.patient else worker.take()) for one in read(answer)]
        self._maps += [LayerMap(one.layer, one.distribution) for one in found]
        predicted = [
            (p / (one.layer - view.layer), prediction)
            for one in found
            if one.number == self._number and one.layer > view.layer
            for p, prediction in one.predictions
        ]
        predicted.sort(key=lambda pair: -pair[0])
        return [prediction for _, prediction in predicted]
