"""No prefetching."""

from collections.abc import Sequence
from typing import ClassVar

from core.policy.predict.base import Prediction, Predictor, View
from core.settings.registry import register


@register("predictor", "none", title="None", help="Experts are fetched only when they are needed.", source="baseline")
class NoPrediction(Predictor):
    """Never called, predicts nothing."""

    batches: ClassVar[bool] = True
    looks: ClassVar[bool] = False

    def predict(self, view: View) -> Sequence[Prediction]:
        return ()
