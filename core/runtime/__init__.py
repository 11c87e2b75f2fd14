"""Runs forward passes: the MoE step, expert arithmetic, handling of misses, and step records."""
