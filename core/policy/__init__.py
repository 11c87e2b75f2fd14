"""Decides: which expert leaves, which is fetched ahead, which stands in for another.

No device, no I/O, no clock: ids and numbers only.
"""

from core.policy import allocation, eviction, predict, substitute

__all__ = ["allocation", "eviction", "predict", "substitute"]
