"""The KV cache, of the size that the budget reserved: allocated in the first pass and then reused."""

from __future__ import annotations

import torch
from transformers import DynamicCache, PreTrainedModel

from core.hf.cache import reserve


class SequenceKV:
    """Keys, values and states of the first `length` tokens of one sequence. They last as long as the sequence wants
    them, or until the memory is given to another one."""

    __slots__ = ("_cache", "exact", "length")

    def __init__(self, cache: DynamicCache) -> None:
        self._cache: DynamicCache | None = cache
        self.length = 0
        self.exact = True  # nothing lossy was computed in any of the tokens

    @property
    def cache(self) -> DynamicCache:
        """What transformers reads and appends to, while the memory is this sequence's."""
        assert self._cache is not None, "the memory of this KV cache was given to another sequence"
        return self._cache

    def give_up(self) -> None:
        """The memory is given to another sequence."""
        self._cache = None


class KVCache:
    """Memory for keys, values and recurrent states of every layer of `model`, for `context` positions: of one sequence
    at a time, the `holder`."""

    def __init__(self, model: PreTrainedModel, context: int) -> None:
        self._config = model.config
        cache = DynamicCache(config=self._config)
        self._own = reserve(cache, context)
        self._layers = cache.layers
        self.holder: SequenceKV | None = None

    @torch.inference_mode()
    def fresh(self) -> SequenceKV:
        """The memory, emptied, for a sequence to begin or to start over. Whoever held it loses what was there."""
        if self.holder is not None:
            self.holder.give_up()
        for layer in self._own:
            layer.clear()
        cache = DynamicCache(config=self._config)
        cache.layers = self._layers
        self.holder = SequenceKV(cache)
        return self.holder

    @property
    def bytes(self) -> int:
        """Device bytes allocated now."""
        return sum([layer.growing_bytes + layer.state_bytes for layer in self._own])
