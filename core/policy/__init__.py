"""Decides: which expert leaves, which is fetched ahead, which stands in for another.

No device, no I/O, no clock: ids and numbers only.
"""

from core.policy import eviction, predict, sizes, substitute

__all__ = ["eviction", "predict", "sizes", "substitute"]
