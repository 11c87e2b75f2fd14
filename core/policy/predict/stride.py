"""Evaluates one router several layers ahead: more time to fetch, less accuracy."""

from collections.abc import Sequence
from typing import ClassVar

from core.policy.predict.base import Prediction, Predictor, View
from core.policy.predict.ranking import Again, Distance, Floor, Width, best, limit, reach
from core.settings.registry import register

STRIDE = 4  # layers ahead, unless another distance is set


@register(
    "predictor",
    "stride",
    title="Stride",
    help="While a layer is computed, the router a stride ahead is asked on the same state, and its likeliest experts "
    "are fetched. The first layers take the previous token's experts.",
    source="ProMoE (Song et al. 2024), its stride prefetching; ProMoE trains a network for each layer, here the "
    "model's own router stands in for it",
)
class Stride(Predictor):
    """At every layer exactly one router is evaluated, that of layer l + stride, so each layer is predicted once,
    `stride` layers early. As in ProMoE: the fixed stride, one prediction per layer, prefetches that yield to demands
    (the engine's link does that for every predictor). Unlike it: no trained networks, and experts are copied whole, not
    in chunks."""

    batches: ClassVar[bool] = True
    asks: ClassVar[bool] = True

    def __init__(self, width: Width = 0, floor: Floor = 0.0, distance: Distance = 0) -> None:
        self._width, self._floor, self._distance = width, floor, distance or STRIDE
        self._again = Again()

    def predict(self, view: View) -> Sequence[Prediction]:
        stride = reach(view, self._distance)
        if view.layer < stride:
            self._again.note(view.layer, view.ids)
        ahead = view.layer + stride
        if ahead >= view.layers:
            return self._again.predictions(ahead - view.layers, self._width or view.top_k)
        return best(ahead, view.ask((ahead,))[0], limit(view, ahead, self._width), self._floor)
