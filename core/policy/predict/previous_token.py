"""Predicts the experts that the previous token used in the same layer."""

from collections.abc import Sequence

from core.policy.predict.base import Prediction, Predictor, View
from core.policy.predict.ranking import Again, Distance, Width, layer_ahead, limit
from core.settings.registry import register


@register(
    "predictor",
    "previous_token",
    title="Previous token",
    help="The next layer's experts of the previous token are fetched again, those it chose first before the others.",
    source="baseline",
)
class PreviousToken(Predictor):
    """Keeps each layer's choice for the last token of the last pass. Score: how often such predictions were correct."""

    def __init__(self, width: Width = 0, distance: Distance = 0) -> None:
        self._width, self._distance = width, distance or 1
        self._again = Again()

    def predict(self, view: View) -> Sequence[Prediction]:
        self._again.note(view.layer, view.ids)
        ahead = layer_ahead(view, self._distance)
        return self._again.predictions(ahead, limit(view, ahead, self._width))
