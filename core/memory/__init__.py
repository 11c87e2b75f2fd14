"""Moves bytes: where expert weights live and how they travel. Knows nothing of policies."""
