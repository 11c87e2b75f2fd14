"""The next layer's router, evaluated on its input if every chosen expert returned its mean output."""

from typing import ClassVar

from core.policy.predict.base import Floats, View
from core.policy.predict.ranking import NextLayer
from core.settings.registry import register


@register(
    "predictor",
    "default_vectors",
    title="Default vectors",
    help="The next layer's router is asked on the state that this layer's experts leave on average, and its likeliest "
    "experts are fetched. Layer 0 takes the previous token's experts.",
    source="Speculating Experts section 3.2, the quasi-hidden state",
)
class DefaultVectors(NextLayer):
    """q_{l+1} = Norm_{l+1}(r_l + D_l), D_l = sum over the experts S_l that were actually chosen of g_e * d_{l,e} with
    their actual weights g; prediction = R_{l+1}(q_{l+1}). The next attention is left out.

    For a layer with a shared expert, D_l holds only the routed experts' part: the shared one's output is not known yet,
    and a profile has no mean of it. For a layer that does more with its experts' output than adding it (a norm after
    it), or a router that no norm feeds, the router is evaluated on h_l, as in the next-layer gate."""

    defaults: ClassVar[bool] = True
    needs: ClassVar[tuple[str, ...]] = ("defaults",)

    def _scores(self, view: View, ahead: int) -> Floats:
        predicted: Floats = view.ask((ahead,), "default")[0]
        return predicted
