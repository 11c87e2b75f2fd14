"""Finds a config's text model: multimodal models nest it in a separate config."""

from collections.abc import Mapping
from typing import Any

NESTED = ("thinker_config", "text_config", "language_config", "llm_config")


def text_config(config: Any) -> Any:
    """The part of a config (transformers' object, or a parsed config.json) that describes the text model: the config
    itself if it is not nested."""
    for name in NESTED:
        inner = config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
        if isinstance(inner, Mapping) or hasattr(inner, "model_type"):
            return text_config(inner)
    return config
