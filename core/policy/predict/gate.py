"""The next layer's own router, asked one layer early."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from core.policy.predict.base import Guess, Predictor, View
from core.registry import Param, register


@register("predictor", "gate", title="Next-layer gate", help="While a layer is computed, the next layer's router is "
          "asked on the same state, and its likeliest experts are fetched. Layer 0 takes the previous token's experts.",
          source="Mixtral-offloading section 3.2; the baseline R_{l+1}(h_l) of Speculating Experts and MoEpic",
          params=(Param("width", "int", 0, "How many experts to fetch for the next layer. 0 = as many as the router "
                        "selects.", title="Width", low=0, high=256, step=1, unit="experts"),
                  Param("floor", "float", 0.0, "Fetch only experts with at least this probability.", title="Least "
                        "probability", low=0.0, high=1.0, step=0.01)))
class NextGate(Predictor):
    """Remembers layer 0's experts of the current token for the next one."""

    asks: ClassVar[bool] = True

    def __init__(self, width: int = 0, floor: float = 0.0) -> None:
        self._width, self._floor = width, floor
        self._first: list[int] = []

    def predict(self, view: View) -> Sequence[Guess]:
        width = self._width or view.top_k
        if view.layer == 0:
            self._first = list(dict.fromkeys(view.ids[-1]))
        if view.layer + 1 == view.layers:
            return [Guess(0, expert, 1.0 - i / 1000) for i, expert in enumerate(self._first[:width])]
        scores = view.gate(view.layer + 1)
        tokens = len(view.ids)
        best = np.argsort(-scores, kind="stable")[: width if tokens == 1 else min(width * tokens, scores.size)]
        return [Guess(view.layer + 1, int(e), float(scores[e])) for e in best if scores[e] >= self._floor * tokens]
