"""Least recently used: the baseline of every paper here, and the policy of Mixtral-offloading."""

from core.policy.eviction.base import Eviction, Ids
from core.settings.registry import register


@register(
    "eviction",
    "lru",
    title="LRU",
    help="The expert unused for longest leaves. Good when the same experts come "
    "back soon; falls to nothing when one pass needs more experts than there are slots.",
    source="Mixtral-offloading (Eliseev and Mazur 2023)",
)
class LRU(Eviction):
    """Score: the tick of the last use."""

    def used(self, ids: Ids, tick: Ids, now: int) -> None:
        self.score[ids] = tick
