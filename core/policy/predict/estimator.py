"""A trained network in place of the next layer's router, in all layers or where the router predicts badly."""

from typing import Annotated, ClassVar

from core.policy.predict.base import Floats, View
from core.policy.predict.ranking import Floor, NextLayer, Width
from core.settings.param import Param
from core.settings.registry import register


@register(
    "predictor",
    "estimator",
    title="Estimator",
    help="A small network, trained on this model, tells the next layer's experts from this layer's state: the one it "
    "was trained on, as its profile says. Layer 0 takes the previous token's experts.",
    source="Speculating Experts section 6.1 and appendix A, Est-PF of section 6.3",
)
class Estimated(NextLayer):
    """The network's distribution for layer l + 1, given layer l's state."""

    needs: ClassVar[tuple[str, ...]] = ("estimator",)

    def _scores(self, view: View, ahead: int) -> Floats:
        return view.estimate(ahead)


@register(
    "predictor",
    "hybrid",
    title="Estimator where needed",
    help="The trained network predicts a layer's experts where the layer's own router, run early, predicts them badly; "
    "elsewhere that router does, on the state that default vectors make if the profile has its recall there.",
    source="Speculating Experts section 6.3, Hybrid-PF",
)
class Hybrid(Estimated):
    """Layer l + 1 by the network if its router's recall is below the threshold, else by that router: R_{l+1}(q_{l+1})
    where a profile has its recall, as in the paper, else R_{l+1}(h_l)."""

    defaults: ClassVar[bool] = True
    needs: ClassVar[tuple[str, ...]] = ("estimator", "gate_recall")

    def __init__(
        self,
        threshold: Annotated[
            float,
            Param(
                "The network predicts in layers where the share of experts that the router, run early, predicted "
                "right in the profile is below this.",
                title="Least recall",
                low=0.0,
                high=1.0,
                step=0.01,
            ),
        ] = 0.5,
        width: Width = 0,
        floor: Floor = 0.0,
    ) -> None:
        super().__init__(width, floor)
        self._threshold = threshold

    def _scores(self, view: View, ahead: int) -> Floats:
        known = view.profile
        assert known is not None and known.gate_recall is not None
        quasi = known.defaults is not None and known.default_recall is not None
        recall = known.default_recall if quasi else known.gate_recall
        assert recall is not None
        if recall[ahead] < self._threshold:
            return view.estimate(ahead)
        predicted: Floats = view.ask((ahead,), "default" if quasi else "hidden")[0]
        return predicted
