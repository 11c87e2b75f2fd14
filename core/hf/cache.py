"""KV cache layers of fixed size: the memory that the budget reserved is allocated once and reused.

transformers' own layers concatenate the whole cache for every token; these write in place. The states of linear
attention and short convolutions have one size for every context: transformers' own code keeps them, and this module
counts their bytes. A layer of any other kind is refused by name, because its size cannot be guaranteed.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import cache_utils
from transformers.cache_utils import (
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from core.errors import ModelError


class ReservedTensor:
    """A tensor of fixed capacity along one dimension, filled from the front. Allocated at the first append."""

    __slots__ = ("_capacity", "_dim", "_tensor", "bytes", "length")

    def __init__(self, capacity: int, dim: int) -> None:
        self._capacity, self._dim = capacity, dim
        self._tensor: torch.Tensor | None = None
        self.length = self.bytes = 0

    def append(self, new: torch.Tensor) -> torch.Tensor:
        """Append `new` and return a view of everything so far. Raises ValueError when the capacity is exceeded."""
        if self._tensor is None:
            self._tensor = self._allocate(new)
        start, end = self.length, self.length + new.shape[self._dim]
        if end > self._capacity:
            raise ValueError(f"the KV cache holds {self._capacity} tokens, {end} were given")
        self._tensor.narrow(self._dim, start, end - start).copy_(new)
        self.length = end
        return self._tensor.narrow(self._dim, 0, end)

    def keep_last(self, full: torch.Tensor) -> torch.Tensor:
        """Replace the content by the last positions of `full`, as many as fit; returns a view of them."""
        self.length = 0
        kept = min(self._capacity, full.shape[self._dim])
        return self.append(full.narrow(self._dim, full.shape[self._dim] - kept, kept))

    def _allocate(self, like: torch.Tensor) -> torch.Tensor:
        shape = list(like.shape)
        shape[self._dim] = self._capacity
        tensor = like.new_empty(shape)
        self.bytes = tensor.numel() * tensor.itemsize
        return tensor


class Reserved:
    """Interface of every layer here, in addition to that of transformers' cache layers.

    Created by `reserve`, which replaces a transformers layer by one of these classes and calls `_reserve`.
    """

    window: int | None = None  # maximum positions kept; None = the whole context
    state_bytes = 0  # bytes allocated independent of the context

    @property
    def growing_bytes(self) -> int:
        """Bytes allocated in proportion to the positions kept."""
        return 0

    def clear(self) -> None:
        """Drop the content, keep the memory."""

    def _reserve(self, context: int) -> None:
        """Set the capacity to `context` positions; nothing is allocated yet."""


class ReservedLayer(Reserved, DynamicLayer):
    """Full attention: keys and values [batch, heads, context, dim]."""

    def _reserve(self, context: int) -> None:
        super()._reserve(context)
        self._rooms = ReservedTensor(context, 2), ReservedTensor(context, 2)
        self.is_initialized = False

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append [batch, heads, n, dim] and return everything so far. Raises ValueError when the
        capacity is exceeded."""
        if not self.is_initialized:
            self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True
        keys, values = self._rooms
        self.keys, self.values = keys.append(key_states), values.append(value_states)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        return self._rooms[0].length

    @property
    def growing_bytes(self) -> int:
        return super().growing_bytes + sum(room.bytes for room in self._rooms)

    def clear(self) -> None:
        super().clear()
        for room in self._rooms:
            room.length = 0


class ReservedWindow(Reserved, DynamicSlidingWindowLayer):
    """Sliding window: the last `window` keys and values; the current token's own come with the call."""

    def _reserve(self, context: int) -> None:
        super()._reserve(context)
        self.window = max(1, self.sliding_window - 1)
        room = min(context, self.window)
        self._rooms = ReservedTensor(room, 2), ReservedTensor(room, 2)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the window's content followed by [batch, heads, n, dim], and keep the last positions of both."""
        full: tuple[torch.Tensor, torch.Tensor] = super().update(key_states, value_states, *args, **kwargs)
        self.keys, self.values = (room.keep_last(t) for room, t in zip(self._rooms, full, strict=True))
        return full

    @property
    def growing_bytes(self) -> int:
        return super().growing_bytes + sum(room.bytes for room in self._rooms)

    def clear(self) -> None:
        super().clear()
        self.cumulative_length = 0
        if self.is_initialized:
            self.keys, self.values = self.keys[:, :, :0], self.values[:, :, :0]


class ReservedStates(Reserved, LinearAttentionLayer):
    """Linear attention and short convolutions: states whose size does not depend on the context."""

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        super().lazy_initialization(*args, **kwargs)
        self.state_bytes = sum(t.numel() * t.itemsize for t in self.states())

    def states(self) -> list[torch.Tensor]:
        """The states, once the first pass has allocated them."""
        return [t for t in (*self.conv_states.values(), *self.recurrent_states.values()) if t is not None]

    def clear(self) -> None:
        super().clear()
        LinearAttentionLayer.reset(self)


class ReservedHybrid(ReservedStates, ReservedLayer, LinearAttentionAndFullAttentionLayer):
    """States and full attention."""


class ReservedHybridWindow(ReservedStates, ReservedWindow, LinearAttentionAndSlidingWindowAttentionLayer):
    """States and a sliding window."""


class ReservedIndexed(ReservedLayer, cache_utils.DynamicIndexedLayer):
    """Full attention that selects positions by a small index [batch, context, dim]."""

    def _reserve(self, context: int) -> None:
        super()._reserve(context)
        self._index = ReservedTensor(context, 1)

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """Append [batch, n, dim] and return everything so far."""
        self.indexer_keys = self._index.append(indexer_key_states)
        self.is_indexer_initialized = True
        return self.indexer_keys

    @property
    def growing_bytes(self) -> int:
        positions = getattr(self, "indexer_position_ids", None)  # some models store these on one layer
        return super().growing_bytes + self._index.bytes + (0 if positions is None else positions.nbytes)

    def clear(self) -> None:
        super().clear()
        self._index.length = 0
        self.indexer_position_ids = None


RESERVED: dict[type[Any], type[Reserved]] = {
    DynamicLayer: ReservedLayer,
    DynamicSlidingWindowLayer: ReservedWindow,
    LinearAttentionLayer: ReservedStates,
    LinearAttentionAndFullAttentionLayer: ReservedHybrid,
    LinearAttentionAndSlidingWindowAttentionLayer: ReservedHybridWindow,
    cache_utils.DynamicIndexedLayer: ReservedIndexed,
}
if hasattr(cache_utils, "DummyLayer"):  # since transformers 5.18: layers without attention, or that share another's
    RESERVED[cache_utils.DummyLayer] = type("ReservedNothing", (Reserved, cache_utils.DummyLayer), {})


def reserve(cache: DynamicCache, context: int) -> list[Reserved]:
    """Replace every layer of a new cache by one of fixed size, for `context` positions, and return these: one per layer
    of the model. Raises ModelError for an unsupported kind of layer, leaving the cache unchanged."""
    for layer in cache.layers:
        if type(layer) not in RESERVED:
            raise ModelError(f"it keeps a state, {type(layer).__name__}, that Moestro does not know")
    own = [_reserved(layer, context) for layer in cache.layers]
    cache.layers = list(own)
    return own


def _reserved(layer: Any, context: int) -> Reserved:
    kind = RESERVED[type(layer)]
    own = kind.__new__(kind)
    vars(own).update(vars(layer))  # attributes that transformers set from the config, in any version
    own._reserve(context)
    return own
