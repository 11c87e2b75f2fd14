"""Decisions about experts: which to evict, which to prefetch, which to compute as a substitute.

No device, no I/O, no clock: ids and numbers only."""

from core.policy import allocation, batching, eviction, predict, substitute

__all__ = ["allocation", "batching", "eviction", "predict", "substitute"]
