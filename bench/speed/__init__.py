"""Suites of speed: tokens, prompts, batches, expert formats, and the engine's own code."""
