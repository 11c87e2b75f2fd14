"""MoE-Infinity's activation counts: predicts the experts that this request has used most so far."""

from collections.abc import Sequence

import numpy as np

from core.policy.predict.base import Prediction, Predictor, View
from core.policy.predict.ranking import Distance, ExpertUse, Floor, Width, best, by_use, layer_ahead, limit
from core.settings.registry import register


@register(
    "predictor",
    "request",
    title="Request counts",
    help="The next layer's experts that this prompt and its "
    "answer have used most are fetched. Each prompt starts counting anew.",
    source="MoE-Infinity (Xue et al. 2024), its activation matrix of the current request; FineMoE's control",
)
class RequestCounts(Predictor):
    """Score: the share of the request's tokens so far that used the expert."""

    def __init__(self, width: Width = 0, floor: Floor = 0.0, distance: Distance = 0) -> None:
        self._width, self._floor, self._distance = width, floor, distance or 1
        self._request: int | None = None
        self._tally = ExpertUse(0, 0)

    def predict(self, view: View) -> Sequence[Prediction]:
        if view.request != self._request:
            self._request, self._tally = view.request, ExpertUse.of(view)
        tally = self._tally
        tally.add(view.layer, np.array(view.ids, np.int64))
        ahead = layer_ahead(view, self._distance)
        if not tally.tokens[ahead]:
            return ()
        return best(
            ahead,
            tally.uses[ahead] / tally.tokens[ahead],
            limit(view, ahead, self._width),
            self._floor,
            by_use(tally.uses[ahead], tally.last[ahead]),
        )
