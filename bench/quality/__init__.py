"""Suites of whole systems, and of what lossy choices cost in answers and gain in speed."""
