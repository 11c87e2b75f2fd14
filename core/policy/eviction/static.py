"""A cache that does not adapt: keeps the experts most used in a profile."""

from typing import ClassVar

from core.policy.eviction.base import RECENT, Eviction, Floats, Ids
from core.settings.registry import register

PINNED = 1e12  # above any count of a profile


@register(
    "eviction",
    "static",
    title="Static top",
    help="The experts that a profile of this model used most stay, and pinned ones before them; what else is fetched "
    "shares the slots that are left. Without a profile and pins it is LRU.",
    source="control; profiled placement as in MoE-Infinity and BuddyMoE's baselines",
)
class Static(Eviction):
    """Score: the profile's count, far above any count for a pinned expert, plus a fraction for the tick of the last
    use."""

    time_dependent: ClassVar[bool] = True

    def admitted(self, ids: Ids, tick: Ids, now: int) -> None:
        self.score[ids] = tick * RECENT

    def used(self, ids: Ids, tick: Ids, now: int) -> None:
        self.score[ids] = tick * RECENT

    def scores(self, part: slice, now: int, layer: Ids) -> Floats:
        return self.score[part] + self.cached_static_score(part, layer)

    def static_score(self, part: slice, layer: Ids) -> Floats:
        return self.expert_index.usual[part] + PINNED * self.expert_index.pinned[part]
