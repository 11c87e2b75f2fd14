"""A pass of a transformers model with a KV cache, by whatever name the installed transformers takes it: its models call
the argument `cache` since 5.24, and `past_key_values` before."""

from __future__ import annotations

import inspect
from typing import Any, Final

import torch
from transformers import DynamicCache
from transformers.masking_utils import create_causal_mask

CACHE: Final = "cache" if "cache" in inspect.signature(create_causal_mask).parameters else "past_key_values"


def cached_pass(model: Any, input_ids: torch.Tensor, cache: DynamicCache, **more: Any) -> Any:
    """The model's output for input_ids [B, T], which follow what the cache holds; it then holds them, too."""
    return model(input_ids=input_ids, use_cache=True, **{CACHE: cache}, **more)
