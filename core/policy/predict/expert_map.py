"""FineMoE: predicts that this pass continues like the earlier pass that began most alike."""

from collections import deque
from collections.abc import Sequence
from typing import Annotated, ClassVar, NamedTuple

from core.policy.predict.base import Later, LayerMap, Prediction, Predictor, View
from core.policy.predict.map_search import MapMatch, MapSearch, followed, opened, read
from core.policy.predict.ranking import Distance
from core.policy.predict.worker import AsyncWorker, InlineWorker, WorkerTask
from core.settings.param import Param
from core.settings.registry import register

DISTANCE = 3  # layers ahead, unless another one is set
BEHIND = 2  # passes that the search may be behind; later ones are skipped


class _Pass(NamedTuple):
    """A pass: its number, its request, its tokens, and whether it is `skipped`, since the search is behind."""

    number: int = 0
    request: int = 0
    tokens: tuple[int, ...] = ()
    skipped: bool = False


@register(
    "predictor",
    "expert_map",
    title="Expert maps",
    help="It remembers what all routers said for earlier tokens, searches the one whose embedding, and then whose "
    "layers so far, are most like this token's, and fetches what that one used next. Searching never holds up a layer.",
    source="FineMoE sections 4.1 to 4.4",
)
class ExpertMap(Predictor):
    """Layers [0, d) by embedding, as the pass begins; layer l >= d by the trajectory of layers [0, l - d], as soon as
    layer l - d is routed. So every layer is searched for exactly once. The store starts with the profile's maps.

    The map of a pass over several tokens is their mean. The search by embedding begins when the pass is announced, and
    every result is used as soon as it arrives (section 4.3), unless its layer has been reached by then. The eviction
    policy gets the whole map of a layer, also when it comes too late to prefetch by (section 4.5)."""

    priority = staticmethod(lambda score, p, distance: p / distance)  # section 4.5: p / (l - l_now)
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
        self._opened = 0  # passes so far, announced ones included
        self._pass = _Pass()  # the running one
        self._coming: _Pass | None = None  # announced, and not begun
        self._begun = False
        self._early: list[MapMatch] = []  # for the coming pass
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

    def announce(self, view: View) -> None:
        self._open(view)

    def begin(self, view: View) -> Sequence[Prediction]:
        self._pass, self._coming, self._begun = self._open(view), None, True
        return self.arrived(view.layer)

    def predict(self, view: View) -> Sequence[Prediction]:
        if view.layer == 0 and not self._begun:  # the model was called directly, not by the engine
            self._pass, self._coming = self._numbered(view), None
            self._worker(view).give(opened(self._pass.number, len(view.ids)))
        self._begun = False
        if not self._pass.skipped:
            self._ahead.append((followed(self._pass.number, view.layer), view.distribution()))
        return self.arrived(view.layer)

    def arrived(self, at: int) -> Sequence[Prediction]:
        worker, found = self.worker, self._early
        if worker is None:
            return ()
        self._send()
        found += [one for answer in (worker.wait() if self.patient else worker.take()) for one in read(answer)]
        if not found:
            return ()
        self._early = [one for one in found if one.number > self._pass.number]
        past = [one for one in found if one.number <= self._pass.number]
        self._maps += [LayerMap(one.layer, one.distribution) for one in past]
        return [
            prediction
            for one in past
            if one.number == self._pass.number and one.layer > at
            for prediction in one.predictions
        ]

    def take_maps(self) -> Sequence[LayerMap]:
        found, self._maps = self._maps, []
        return found

    def close(self) -> None:
        if self.worker is not None:
            self.worker.close()

    def _open(self, view: View) -> _Pass:
        """The coming pass; its search begins now, unless it has been announced."""
        known = self._coming
        if known is not None and (known.request, known.tokens) == (view.request, tuple(view.tokens)):
            return known
        coming = self._coming = self._numbered(view)
        self._early.clear()
        if not coming.skipped:
            self._ahead.append((opened(coming.number, len(view.tokens)), view.embedding()))
            self._send()
        return coming

    def _numbered(self, view: View) -> _Pass:
        self._opened += 1
        skipped = self._worker(view).behind > BEHIND * view.layers
        return _Pass(self._opened, view.request, tuple(view.tokens), skipped)

    def _worker(self, view: View) -> AsyncWorker:
        self.worker = self.worker or InlineWorker(MapSearch(self.task(view)))
        return self.worker

    def _send(self) -> None:
        """Give the worker the values that are there."""
        while self.worker is not None and self._ahead and (self.patient or self._ahead[0][1].ready()):
            head, later = self._ahead.popleft()
            self.worker.give(head + later().astype("<f4", copy=False).tobytes())
