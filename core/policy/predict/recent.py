"""TLP: predicts the experts that the last tokens used most."""

from collections.abc import Sequence

import numpy as np

from core.policy.predict.base import Prediction, Predictor, View
from core.policy.predict.ranking import Distance, Floor, Ints, Width, best, by_use, layer_ahead, limit
from core.settings.registry import register

TOKENS = 32


@register(
    "predictor",
    "recent",
    title="Recently used (TLP)",
    help="The next layer's experts that the last tokens used most are fetched; among equals the one used last.",
    source="the temporal-locality predictor (TLP) that ExpertFlow compares with",
)
class Recent(Predictor):
    """Score: the share of the last TOKENS tokens (or of all, while there were fewer) that used the expert."""

    def __init__(self, width: Width = 0, floor: Floor = 0.0, distance: Distance = 0) -> None:
        self._width, self._floor, self._distance = width, floor, distance or 1
        self._window: dict[int, Ints] = {}  # layer -> choices [up to tokens, k], newest last

    def predict(self, view: View) -> Sequence[Prediction]:
        ids: Ints = np.array(view.ids, np.int64)
        old = self._window.get(view.layer, ids[:0])
        self._window[view.layer] = np.concatenate((old, ids))[-TOKENS:]
        ahead = layer_ahead(view, self._distance)
        seen = self._window.get(ahead)
        if seen is None:
            return ()
        uses = np.bincount(seen.ravel(), minlength=view.experts)
        last: Ints = np.zeros(view.experts, np.int64)
        last[seen] = np.arange(1, len(seen) + 1)[:, None]  # of several values for one expert the last one stays
        return best(ahead, uses / len(seen), limit(view, ahead, self._width), self._floor, by_use(uses, last))
