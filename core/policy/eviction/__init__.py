"""Eviction policies, one small file each; importing this package registers them."""

from core.policy.eviction import class_lru, fifo, finemoe, lcp, least_stale, lfru, lfu, lru, none, plec, random, static
from core.policy.eviction.base import GONE, Eviction, ExpertIndex, MakePolicy, policy_maker, victim
from core.policy.eviction.belady import NEVER, Belady
from core.settings.registry import same_variants

same_variants("host_eviction", "eviction")  # of the device's slots and of host memory

__all__ = [
    "GONE",
    "NEVER",
    "Belady",
    "Eviction",
    "ExpertIndex",
    "MakePolicy",
    "class_lru",
    "fifo",
    "finemoe",
    "lcp",
    "least_stale",
    "lfru",
    "lfu",
    "lru",
    "none",
    "plec",
    "policy_maker",
    "random",
    "static",
    "victim",
]
