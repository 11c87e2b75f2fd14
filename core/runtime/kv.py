"""A KV cache of fixed size: what the budget reserved is what is allocated, and a token costs one small copy.

transformers' DynamicCache concatenates the whole cache for every token; this one writes into its place. Layers of other
kinds (sliding window, linear attention) stay transformers' own.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer


class ReservedLayer(DynamicLayer):
    """Keys and values [batch, heads, capacity, dim], of which the first `length` positions are in use."""

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self._capacity, self._length = capacity, 0
        self.bytes = 0                                    # allocated
        self._keys: torch.Tensor | None = None
        self._values: torch.Tensor | None = None

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any,
               **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Append [batch, heads, n, dim] and return everything so far. Raises ValueError when the capacity is passed."""
        if self._keys is None or self._values is None:
            self._keys, self._values = self._reserve(key_states), self._reserve(value_states)
            self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True
            self.bytes = sum(t.numel() * t.element_size() for t in (self._keys, self._values))
        start, new = self._length, key_states.shape[-2]
        end = start + new
        if end > self._capacity:
            raise ValueError(f"the KV cache holds {self._capacity} tokens, {end} were given")
        self._keys.narrow(2, start, new).copy_(key_states)
        self._values.narrow(2, start, new).copy_(value_states)
        self._length = end
        self.keys, self.values = self._keys.narrow(2, 0, end), self._values.narrow(2, 0, end)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        return self._length

    def clear(self) -> None:
        """Forget everything, keep the memory."""
        self._length = 0

    def _reserve(self, states: torch.Tensor) -> torch.Tensor:
        batch, heads, _, dim = states.shape
        return states.new_empty(batch, heads, self._capacity, dim)


class KVCache:
    """One chat's cache, its full-attention layers reused from answer to answer."""

    def __init__(self, model: PreTrainedModel, context: int) -> None:
        self._config, self._context = model.config, context
        self._reserved: dict[int, ReservedLayer] = {}
        self._others: list[Any] = []
        self._allocated = 0               # bytes of all reserved layers, once the first pass has allocated them
        self.fresh()

    def fresh(self) -> DynamicCache:
        """An empty cache for transformers; the previous one must no longer be used."""
        cache = DynamicCache(config=self._config)
        for i, layer in enumerate(cache.layers):
            if type(layer) is DynamicLayer:
                own = self._reserved.setdefault(i, ReservedLayer(self._context))
                own.clear()
                cache.layers[i] = own
        self._others = [layer for layer in cache.layers if not isinstance(layer, ReservedLayer)]
        return cache

    @property
    def bytes(self) -> int:
        """Device bytes allocated now."""
        tensors = [t for layer in self._others for t in vars(layer).values() if isinstance(t, torch.Tensor)]
        reserved = self._allocated
        if not reserved:
            each = [layer.bytes for layer in self._reserved.values()]
            reserved, self._allocated = sum(each), sum(each) if all(each) else 0
        return reserved + sum(t.numel() * t.element_size() for t in tensors)
