"""Suites of routing: which experts are chosen, which are predicted, and which a cache keeps."""
