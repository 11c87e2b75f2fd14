"""The KV cache of one chat, of the size that the budget reserved: allocated in the first pass and then reused."""

from __future__ import annotations

import torch
from transformers import DynamicCache, PreTrainedModel

from core.hf.cache import reserve


class KVCache:
    """Keys, values and recurrent states of every layer of `model`, for `context` positions of one sequence."""

    def __init__(self, model: PreTrainedModel, context: int) -> None:
        self._config = model.config
        cache = DynamicCache(config=self._config)
        self._own = reserve(cache, context)
        self._layers = cache.layers

    @torch.inference_mode()
    def fresh(self) -> DynamicCache:
        """An empty cache for transformers, also after an answer that broke off. The cache returned before must no
        longer be used."""
        for layer in self._own:
            layer.clear()
        cache = DynamicCache(config=self._config)
        cache.layers = self._layers
        return cache

    @property
    def bytes(self) -> int:
        """Device bytes allocated now."""
        return sum([layer.growing_bytes + layer.state_bytes for layer in self._own])
