"""Eviction policies, one small file each; importing this package registers them."""

from core.policy.eviction import fifo, finemoe, lcp, least_stale, lfu, lru, none, plec, random, static
from core.policy.eviction.base import GONE, Eviction, ExpertIndex, victim
from core.policy.eviction.belady import NEVER, Belady

__all__ = [
    "GONE",
    "NEVER",
    "Belady",
    "Eviction",
    "ExpertIndex",
    "fifo",
    "finemoe",
    "lcp",
    "least_stale",
    "lfu",
    "lru",
    "none",
    "plec",
    "random",
    "static",
    "victim",
]
