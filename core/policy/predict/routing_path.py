"""ExpertFlow: a small network reads the same tokens as the model and predicts the experts of all layers at once."""

from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from core.policy.predict.base import Prediction, Predictor, View, shares_of
from core.policy.predict.path_messages import Share, answered, asked
from core.policy.predict.path_reader import ACTIVE, PathReader
from core.policy.predict.ranking import Distance, Floor, Width, best
from core.policy.predict.worker import AsyncWorker, InlineWorker, WorkerTask
from core.settings.param import Param
from core.settings.registry import register

Singles = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]
DISTANCE = 4  # layers ahead that are fetched again, unless another one is set
FOLLOWED = 256  # requests whose place in their text is known, the latest


class _Told(NamedTuple):
    """The answer about the next tokens of one request: see path_messages.Answer."""

    number: int
    idle: Singles  # [L * E]
    active: Bools  # [L * E]


class _Coming(NamedTuple):
    """The next tokens of a request, and the number of the search for them."""

    number: int
    tokens: tuple[int, ...]


@register(
    "predictor",
    "routing_path",
    title="Routing path",
    help="A small network, trained on this model, reads the "
    "same tokens and tells the experts of every layer before the pass begins, which waits for it at most as long as "
    "that saves. It runs beside the model. For a batch it follows every sequence.",
    source="ExpertFlow section 3.1",
)
class RoutingPath(Predictor):
    """Predicts all layers before a pass begins, from the tokens it was announced with.

    All layers are named at once, nearest first, so that slots fill in the order of use, as far as there are any
    (ExpertFlow section 3.2): before layer 0, or where the pass did not wait long enough, as soon as the answer is
    there. As each layer is reached, the next `distance` layers are named again, for slots that have come free. A pass
    over several sequences needs what each of them does; what is known of a sequence tells a scheduler which others it
    fits to (`expected`)."""

    priority = staticmethod(lambda score, p, distance: score - distance)  # layer by layer: scores are at most 1
    asks: ClassVar[bool] = False
    starts: ClassVar[bool] = True
    batches: ClassVar[bool] = True
    needs: ClassVar[tuple[str, ...]] = ("path",)

    def __init__(
        self,
        width: Width = 0,
        floor: Floor = 0.0,
        distance: Distance = 0,
        active: Annotated[
            Literal["likeliest", "half"],
            Param(
                "Which experts count as needed: as many as Width says, the likeliest; or those with a probability "
                "above one half, as in the paper.",
                title="Needed are",
                choice_titles=("the likeliest", "those above one half"),
            ),
        ] = "likeliest",
    ) -> None:
        self._width, self._floor, self._distance = width, floor, distance or DISTANCE
        self._half = active == "half"
        self.worker: AsyncWorker | None = None
        self._asked = 0  # number of the last search
        self._followed: dict[int, None] = {}  # requests that the reader follows, the one asked about last at the end
        self._coming: dict[int, _Coming] = {}  # by request: announced, and not begun
        self._pass: tuple[int, ...] = ()  # the requests of the pass that runs ...
        self._numbers: tuple[int, ...] = ()  # ... the search for each ...
        self._shape = 0, 0  # ... and (L, E)
        self._told: dict[int, _Told] = {}  # by request, the newest
        self._plan: list[list[Prediction]] = []  # by layer, for that pass; empty before all of it was told

    def task(self, view: View) -> WorkerTask:
        sizes, arrays = view.path()
        return WorkerTask("path", {**sizes, ACTIVE: 0 if self._half else self._width or view.top_k}, arrays)

    def announce(self, view: View) -> None:
        self._ask(view)

    def begin(self, view: View) -> Sequence[Prediction]:
        self._ask(view)
        coming = shares_of(view)
        self._pass = tuple(request for request, _ in coming)
        self._numbers = tuple(self._coming.pop(request).number for request in self._pass)
        self._shape, self._plan = (view.layers, view.experts), []
        if self.patient and self.worker is not None:
            self._hear(self.worker.wait())
        if self.wait is not None and self._numbers:
            self.wait.wait(max(self._numbers), sum(len(tokens) for _, tokens in coming), self._there)
        return self._name(view.layer)

    def predict(self, view: View) -> Sequence[Prediction]:
        if view.layer == 0 and not view.tokens:  # the model was called directly, not by the engine
            self._pass, self._numbers, self._plan = (), (), []
        return self._name(view.layer)

    def arrived(self, at: int) -> Sequence[Prediction]:
        return () if self._plan else self._name(at)

    def expected(self, request: int) -> Bools | None:
        """[L * E] the experts that the next token of a request is predicted to need; None while that is not known."""
        if self.worker is not None:
            self._hear(self.worker.take())
        coming, told = self._coming.get(request), self._told.get(request)
        return told.active if coming is not None and told is not None and told.number == coming.number else None

    def close(self) -> None:
        if self.worker is not None:
            self.worker.close()

    def _ask(self, view: View) -> None:
        """Give the worker what it has not been given of the coming tokens."""
        shares, number = list[Share](), self._asked + 1
        for request, some in shares_of(view):
            tokens, before = tuple(some), self._coming.get(request)
            if before is not None and before.tokens == tokens:
                continue
            # Anew also when other tokens than these were announced: the reader followed tokens that never came.
            shares.append(Share(request, request not in self._followed or before is not None, tokens))
            self._coming[request] = _Coming(number, tokens)
            self._followed.pop(request, None)
            self._followed[request] = None
        if not shares:
            return
        self._asked = number
        self._forget()
        self.worker = self.worker or InlineWorker(PathReader(self.task(view)))
        if self.wait is not None:
            self.wait.asked(number, sum(len(share.tokens) for share in shares))
        self.worker.give(asked(number, shares))

    def _forget(self) -> None:
        """Requests that ended are not told of: the oldest make way."""
        while len(self._followed) > FOLLOWED:
            old = next(iter(self._followed))
            for known in (self._followed, self._coming, self._told):
                known.pop(old, None)

    def _there(self) -> bool:
        """Whether this pass's answers are there."""
        if self.worker is not None:
            self._hear(self.worker.take())
        return bool(self._pass) and all(
            (told := self._told.get(request)) is not None and told.number == number
            for request, number in zip(self._pass, self._numbers, strict=True)
        )

    def _hear(self, answers: Sequence[bytes]) -> None:
        for one in answers:
            number, requests, idle, active = answered(one)
            if self.wait is not None:
                self.wait.answered(number)
            for request, *told in zip(requests, idle, active, strict=True):
                if request in self._followed:
                    self._told[request] = _Told(number, *told)

    def _name(self, at: int) -> list[Prediction]:
        ahead = self._distance
        if not self._plan:
            if not self._there():
                return []
            told = [self._told[request] for request in self._pass]
            chances = -np.expm1(sum(one.idle for one in told)).reshape(self._shape)
            active = np.any([one.active for one in told], 0).reshape(self._shape)
            self._plan = [
                best(layer, np.where(needed, row, 0.0), int(needed.sum()), self._floor)
                for layer, (row, needed) in enumerate(zip(chances, active, strict=True))
            ]
            ahead = len(self._plan)
        return [prediction for named in self._plan[at + 1 :][:ahead] for prediction in named]
