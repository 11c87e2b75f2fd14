"""Eviction policies, one small file each; importing this package registers them."""

from importlib import import_module

from core.policy.eviction.base import GONE, Eviction, ExpertIndex, MakePolicy, policy_maker, victim
from core.policy.eviction.belady import NEVER, Belady
from core.settings.registry import same_variants

for _name in "class_lru fifo finemoe lcp lfru lfu lru none plec random static".split():
    import_module(f"{__name__}.{_name}")
same_variants("host_eviction", "eviction")  # of the device's slots and of host memory

__all__ = ["GONE", "NEVER", "Belady", "Eviction", "ExpertIndex", "MakePolicy", "policy_maker", "victim"]
