"""The next layers' own routers, evaluated early."""

from collections.abc import Sequence
from typing import Annotated, ClassVar

from core.policy.predict.base import Prediction, Predictor, RouterPlan, View
from core.policy.predict.ranking import Again, Distance, Floor, Width, best, limit
from core.settings.param import Param
from core.settings.registry import register


@register(
    "predictor",
    "gate",
    title="Next-layer gate",
    help="While a layer is computed, the next layers' routers are "
    "asked on the same state, and their likeliest experts are fetched.",
    source="Mixtral-offloading section 3.2; the baseline R_{l+1}(h_l) of Speculating Experts; MoEpic section 3.2",
)
class NextGate(Predictor):
    """Router l + j is given h_l, for j in 1 ... distance, nearest first. Layer 0 of the next token has no layer before
    it: its router is given the last layer's state of this token (MoEpic section 3.2), or its experts are kept."""

    asks: ClassVar[bool] = True
    batches: ClassVar[bool] = True
    executes: ClassVar[bool] = True

    def __init__(
        self,
        width: Width = 0,
        floor: Floor = 0.0,
        distance: Distance = 0,
        last_state: Annotated[
            bool,
            Param(
                "Layer 0, which no layer comes before, fetches what its router says to the previous token's state in "
                "the last layer. Off: the previous token's experts.",
                title="Layer 0 by the last state",
            ),
        ] = False,
    ) -> None:
        self._width, self._floor, self._distance, self._last_state = width, floor, distance or 1, last_state
        self._first = Again()
        self.routers = RouterPlan(self._distance, width, "state" if last_state else "experts")

    def passed(self, layer: int, ids: Sequence[int]) -> None:
        if layer == 0:
            self._first.note(0, [ids])

    def predict(self, view: View) -> Sequence[Prediction]:
        last = view.layer + 1 == view.layers
        if last and self._last_state:
            return best(0, view.ask((0,), "last")[0], self._width or view.top_k, self._floor)
        if view.layer == 0:
            self._first.note(0, view.ids)
        if last:
            return self._first.predictions(0, self._width or view.top_k)
        return ask_ahead(view, self._distance, self._width, self._floor)


def ask_ahead(view: View, distance: int, width: int, floor: float) -> list[Prediction]:
    """Predictions of the routers of the next `distance` layers, given this layer's router input."""
    ahead = range(view.layer + 1, min(view.layer + 1 + distance, view.layers))
    if not ahead:
        return []
    return [
        prediction
        for layer, scores in zip(ahead, view.ask(ahead), strict=True)
        for prediction in best(layer, scores, limit(view, layer, width), floor)
    ]
