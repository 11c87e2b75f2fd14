"""Decides: which expert leaves, which is fetched ahead. No device, no I/O, no clock: ids and numbers only."""

from core.policy import eviction, predict, sizes

__all__ = ["eviction", "predict", "sizes"]
