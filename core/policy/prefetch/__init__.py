"""Decides when prefetching pays off."""
