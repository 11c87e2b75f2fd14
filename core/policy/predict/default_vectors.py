"""The next layer's router, evaluated on its input if every chosen expert returned its mean output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from core.policy.predict.base import Prediction, Predictor, View
from core.policy.predict.ranking import Again, Floor, Width, best, limit
from core.settings.registry import register


@register(
    "predictor",
    "default_vectors",
    title="Default vectors",
    help="The next layer's router is asked on the state "
    "that this layer's experts leave on average, and its likeliest experts are fetched. Layer 0 takes the "
    "previous token's experts.",
    source="Speculating Experts section 3.2, the quasi-hidden state",
)
class DefaultVectors(Predictor):
    """q_{l+1} = Norm_{l+1}(r_l + D_l), D_l = sum over the experts S_l that were actually chosen of g_e * d_{l,e} with
    their actual weights g; prediction = R_{l+1}(q_{l+1}). The next attention is left out.

    For a layer with a shared expert, D_l holds only the routed experts' part: the shared one's output is not known yet,
    and a profile has no mean of it. For a layer that does more with its experts' output than adding it (a norm after
    it), or a router that no norm feeds, the router is evaluated on h_l, as in the next-layer gate.
    """

    batches: ClassVar[bool] = True
    asks: ClassVar[bool] = True
    defaults: ClassVar[bool] = True
    executes: ClassVar[bool] = True
    needs: ClassVar[tuple[str, ...]] = ("defaults",)

    def __init__(self, width: Width = 0, floor: Floor = 0.0) -> None:
        self._width, self._floor = width, floor
        self._first = Again()

    def predict(self, view: View) -> Sequence[Prediction]:
        if view.layer == 0:
            self._first.note(0, view.ids)
        ahead = view.layer + 1
        if ahead == view.layers:
            return self._first.predictions(0, self._width or view.top_k)
        return best(ahead, view.ask((ahead,), "default")[0], limit(view, ahead, self._width), self._floor)
