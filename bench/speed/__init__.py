"""Suites of speed: tokens, prompts, batches, and the engine's own code."""
