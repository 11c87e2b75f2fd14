"""Evicts the expert whose layer is computed again last: layers run in a fixed order, so that this much is known."""

from typing import ClassVar

from core.policy.eviction.base import RECENT, Eviction, Floats, Ids
from core.settings.registry import register


@register(
    "eviction",
    "least_stale",
    title="Least stale",
    help="The expert whose layer is furthest from being computed again leaves, which is one of the layer just reached; "
    "within a layer the one unused for longest. Meant for scope global: where each layer has its own slots it is LRU.",
    source="the order of layers, which LRU ignores (FineMoE section 4.5)",
)
class LeastStale(Eviction):
    """Score: minus the layers until its own is reached again, plus a fraction for the tick of its last use."""

    time_dependent: ClassVar[bool] = True

    def admitted(self, ids: Ids, tick: Ids, now: int) -> None:
        self.score[ids] = tick * RECENT

    def used(self, ids: Ids, tick: Ids, now: int) -> None:
        self.score[ids] = tick * RECENT

    def scores(self, part: slice, now: int, layer: Ids) -> Floats:
        return self.score[part] - self.expert_index.distance(part, layer)
