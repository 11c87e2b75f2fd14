"""Profiles of models that there are not."""

from typing import Any

from core.profile import Profile


def profile_of(layers: int, experts: int, k: int, *, tokens: int = 400, **parts: Any) -> Profile:
    """Of a model of these sizes, with these parts."""
    return Profile("m", "m" * 64, layers, experts, k, 8, tokens, "a text", "", **parts)
