"""How much of each expert a layer keeps where experts are cached in blocks: its top (MoEpic section 3.1)."""

from collections.abc import Sequence
from typing import Annotated, ClassVar

from core.policy.allocation.cache_plan import CachePlan
from core.settings.param import Param
from core.settings.registry import register
from core.system.command import COMMAND


class Tops:
    """Base of the ways to split. `needs`: the parts of a profile that it requires. The base keeps whole experts, and
    has them computed as such."""

    needs: ClassVar[tuple[str, ...]] = ()

    def __init__(self, plan: CachePlan | None = None) -> None:
        """`plan`: the one that was saved with the profile."""
        self.plan = plan

    def tops(self, layers: int, blocks: int) -> Sequence[int]:
        """[layers] blocks of an expert that stay when others need slots: 0 to all `blocks`. () = nothing is split."""
        return ()


@register(
    "split",
    "whole",
    title="Whole",
    help="What is cached of an expert is all of it, and it is computed whole: bit for bit as in a model loaded with "
    "one block per expert, for the price of copying its blocks side by side. “The same part” at 1 does not copy.",
    source="theta = 1 in MoEpic section 3.1",
)
class Whole(Tops):
    """The base class unchanged."""


@register(
    "split",
    "uniform",
    title="The same part",
    help="Of every cached expert the same part stays, so that more of them are cached; the rest is fetched when it is "
    "needed, and computed when it lands.",
    source="MoEpic section 3.1",
)
class UniformTops(Tops):
    """The same top in every layer, to the nearest block."""

    def __init__(
        self,
        plan: CachePlan | None = None,
        theta: Annotated[
            float,
            Param(
                "The part of a cached expert that stays, to the nearest block: 1 all of it, 0 nothing, so that only "
                "prefetching brings experts before they are needed.",
                title="Theta",
                low=0.0,
                high=1.0,
                step=0.05,
            ),
        ] = 0.5,
    ) -> None:
        super().__init__(plan)
        self.theta = theta

    def tops(self, layers: int, blocks: int) -> Sequence[int]:
        return [int(self.theta * blocks + 0.5)] * layers


@register(
    "split",
    "moepic",
    title="MoEpic's plan",
    help=f"Each layer keeps the part of its experts that `{COMMAND} plan --save` found for it.",
    source="MoEpic section 3.4, its algorithm 1",
)
class PlannedTops(Tops):
    """The plan's tops."""

    needs = ("plan",)

    def tops(self, layers: int, blocks: int) -> Sequence[int]:
        assert self.plan is not None
        return [one.top for one in self.plan.in_blocks(blocks)]
