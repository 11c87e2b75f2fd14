"""No cache: the lower bound that every cache is measured against."""

from typing import ClassVar

from core.policy.eviction.lru import LRU
from core.settings.registry import register


@register(
    "eviction",
    "none",
    title="None (on demand)",
    help="Nothing is kept: every expert is fetched each time it is needed. The floor that a cache has to beat.",
    source="on-demand offloading, the baseline of all five papers",
)
class NoCache(LRU):
    """Experts are evicted when their step ends; prefetched ones stay until they are used once."""

    retains: ClassVar[bool] = False
