"""Eviction policies, one small file each; importing this package registers them."""

from core.policy.eviction import lfu, lru, none, random
from core.policy.eviction.base import Eviction

__all__ = ["Eviction", "lfu", "lru", "none", "random"]
