"""Where a config describes its text model: models of text and images or sound nest it in a config of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NESTED = ("thinker_config", "text_config", "language_config", "llm_config")


def text_config(config: Any) -> Any:
    """The part of a config (of transformers', or a config.json that was read) that describes the text model: the
    config itself where nothing else is in it."""
    for name in NESTED:
        inner = config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
        if isinstance(inner, Mapping) or hasattr(inner, "model_type"):
            return text_config(inner)
    return config
