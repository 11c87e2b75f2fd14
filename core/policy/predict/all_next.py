"""SE-MoE: prefetches the whole next layer, whatever its router will choose."""

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from core.policy.predict.base import Prediction, Predictor, View
from core.policy.predict.ranking import Distance, ExpertUse, Width, best, by_use, layer_ahead
from core.settings.registry import register


@register(
    "predictor",
    "all_next",
    title="All of the next layer",
    help="Every expert of the next layer is fetched, those used most often first, for as long as there are slots.",
    source="SE-MoE (Shen et al. 2022), ring prefetch",
)
class AllNext(Predictor):
    """Score: (uses + 1) / (tokens + 2), the rule of succession, so that never used experts are predicted too, last."""

    batches: ClassVar[bool] = True

    def __init__(self, width: Width = 0, distance: Distance = 0) -> None:
        self._width, self._distance = width, distance or 1
        self._tally: ExpertUse | None = None

    def predict(self, view: View) -> Sequence[Prediction]:
        tally = self._tally = self._tally or ExpertUse.of(view)
        tally.add(view.layer, np.array(view.ids, np.int64))
        ahead = layer_ahead(view, self._distance)
        uses = tally.uses[ahead]
        return best(
            ahead,
            (uses + 1) / (tally.tokens[ahead] + 2),
            self._width or view.experts,
            order=by_use(uses, tally.last[ahead]),
        )
