"""Predicts layer 0 from the token's id, before anything is computed; other layers by their routers, evaluated early."""

from collections import Counter
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from core.policy.predict.base import Prediction, Predictor, RouterPlan, View
from core.policy.predict.gate import ask_ahead
from core.policy.predict.ranking import Again, Distance, Floor, Width
from core.settings.registry import register


@register(
    "predictor",
    "token_table",
    title="Token table",
    help="The first layer's experts are looked up by the "
    "token's id in a table that the profile holds, as soon as the token is chosen; the other layers' are fetched "
    "as by the next-layer gate.",
    source="ours: of the profile's tokens, which experts of layer 0 each id had",
)
class TokenTable(Predictor):
    """Score in layer 0: for one token, the share of the experts predicted from the table so far that were chosen; for n
    tokens that predict the same expert 1 - (1 - that)^n. A token that is not in the table predicts nothing."""

    asks: ClassVar[bool] = True
    starts: ClassVar[bool] = True
    needs: ClassVar[tuple[str, ...]] = ("first_table",)

    def __init__(self, width: Width = 0, floor: Floor = 0.0, distance: Distance = 0) -> None:
        self._width, self._floor, self._distance = width, floor, distance or 1
        self._named: list[list[int]] = []  # per token of the current pass
        self._came_true = Again()
        self.routers = RouterPlan(self._distance, width, "")

    def begin(self, view: View) -> Sequence[Prediction]:
        self._named = [self._of(view, token) for token in view.tokens]
        counts = Counter(expert for row in self._named for expert in row)
        score = self._came_true.score(0)
        most = min((self._width or view.top_k) * len(view.tokens), view.experts)
        predicted = [Prediction(0, expert, 1.0 - (1.0 - score) ** n) for expert, n in counts.most_common(most)]
        return [prediction for prediction in predicted if prediction.score >= self._floor]

    def predict(self, view: View) -> Sequence[Prediction]:
        if view.layer == 0:
            self._judge(view.ids)
        return ask_ahead(view, self._distance, self._width, self._floor)

    def passed(self, layer: int, ids: Sequence[int]) -> None:
        if layer == 0:
            self._judge([ids])

    def _judge(self, chosen: Sequence[Sequence[int]]) -> None:
        """Count how many of the predicted experts were `chosen` [T][k] in layer 0."""
        for named, row in zip(self._named, chosen, strict=False):
            self._came_true.count(0, named, row)
        self._named = []

    def _of(self, view: View, token: int) -> list[int]:
        assert view.profile is not None and view.profile.first_table is not None
        tokens, experts = view.profile.first_table
        at = int(np.searchsorted(tokens, token))
        if at == len(tokens) or tokens[at] != token:
            return []
        return [expert for expert in experts[at].tolist() if expert >= 0]
