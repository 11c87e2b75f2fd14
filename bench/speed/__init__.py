"""Suites of speed: tokens, prompts, turns, batches, expert formats, and the engine's own code."""
