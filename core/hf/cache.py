"""KV cache layers of fixed size: the memory that the budget reserved is allocated once and reused.

transformers' own layers concatenate the whole cache for every token; these write in place. The states of linear
attention and short convolutions have one size for every context: transformers' own code keeps them, and this module
counts their bytes. A layer of any other kind is refused by name, because its size cannot be guaranteed.

What a layer holds can be copied to host memory and put back. Keys and values of positions can be cut to any number of
them (`rows`); a window that has lost positions, and a state, are of one moment (`moment`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

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
from core.hf.reserved_tensor import ReservedTensor, on_host


class Fixed(NamedTuple):
    """How a pass over one token uses a layer without the host: it writes at `position` [1] int64, on the device, and
    attends to the first `length` positions, of which its mask leaves out those that are not filled."""

    position: torch.Tensor
    length: int


Copied = list[Any]  # of one layer: tensors in host memory, None where there was nothing, and numbers


class Reserved:
    """Interface of every layer here, in addition to that of transformers' cache layers.

    Created by `reserve`, which replaces a transformers layer by one of these classes and calls `_reserve`.
    """

    window: int | None = None  # maximum positions kept; None = the whole context
    state_bytes = 0  # bytes allocated independent of the context
    momentary = False  # it may hold something that cannot be cut
    fixed: Fixed | None = None  # how the running pass uses it; None: by lengths that the host knows

    @property
    def growing_bytes(self) -> int:
        """Bytes allocated in proportion to the positions kept."""
        return 0

    @property
    def fixable(self) -> bool:
        """Whether it can be used as `Fixed` says, now."""
        return False

    def grow(self, count: int) -> None:
        """A pass with `fixed` has written so many more positions."""

    def addresses(self) -> list[int]:
        """Where the memory is that such passes use."""
        return []

    def clear(self) -> None:
        """Drop the content, keep the memory."""

    def drop(self) -> None:
        """Drop the content, and give back the memory of what grows, until it is needed again."""
        self.clear()

    def like(self, other: Any) -> None:
        """Before it was ever used: what was copied from `other`, the same layer of another cache, may be put here."""

    def cuttable(self, length: int) -> bool:
        """Whether the first `length` positions are all there, and can be cut to any number of them."""
        return True

    def cut(self, length: int) -> None:
        """Keep the first `length` positions of what `rows` copies."""

    def rows(self, length: int) -> Copied:
        """Copies in host memory of what can be cut: of the first `length` positions."""
        return []

    def put_rows(self, copied: Iterator[Any], length: int) -> None:
        """Put back the first `length` positions of what `rows` copied."""

    def moment(self) -> Copied:
        """Copies in host memory of what cannot be cut, as it is now."""
        return []

    def put_moment(self, copied: Iterator[Any], most: int | None = None) -> None:
        """Put back what `moment` copied; of what was `cuttable` then, only the first `most` positions."""

    def _reserve(self, context: int) -> None:
        """Set the capacity to `context` positions; nothing is allocated yet."""


class ReservedLayer(Reserved, DynamicLayer):
    """Full attention: keys and values [batch, heads, context, dim]."""

    keys: Any  # a tensor; None before the first pass
    values: Any

    def _reserve(self, context: int) -> None:
        super()._reserve(context)
        self._rooms = ReservedTensor(context, 2), ReservedTensor(context, 2)
        self.is_initialized = False

    @property
    def fixable(self) -> bool:
        return type(self) is ReservedLayer and all(room.memory is not None for room in self._rooms)

    def grow(self, count: int) -> None:
        super().grow(count)
        self.keys, self.values = (room.grown(count) for room in self._rooms)

    def addresses(self) -> list[int]:
        return [room.memory.data_ptr() for room in self._rooms if room.memory is not None]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append [batch, heads, n, dim] and return everything so far. Raises ValueError when the
        capacity is exceeded."""
        if not self.is_initialized:
            self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True
        keys, values = self._rooms
        if self.fixed is not None:
            return self._written(key_states, value_states, self.fixed)
        self.keys, self.values = keys.append(key_states), values.append(value_states)
        return self.keys, self.values

    def _written(self, keys: torch.Tensor, values: torch.Tensor, fixed: Fixed) -> tuple[torch.Tensor, torch.Tensor]:
        found = []
        for room, new in zip(self._rooms, (keys, values), strict=True):
            assert room.memory is not None
            room.memory.index_copy_(2, fixed.position, new)
            found.append(room.memory.narrow(2, 0, fixed.length))
        return found[0], found[1]

    def get_seq_length(self) -> int:
        if self.fixed is not None:
            raise ModelError("it uses the number of its tokens within a pass")
        return self._rooms[0].length

    @property
    def growing_bytes(self) -> int:
        return super().growing_bytes + sum(room.bytes for room in self._rooms)

    def clear(self) -> None:
        super().clear()
        for room in self._rooms:
            room.length = 0

    def drop(self) -> None:
        super().drop()
        self.keys = self.values = None
        for room in self._rooms:
            room.drop()

    def like(self, other: Any) -> None:
        super().like(other)
        _initialize(self, other)

    def cuttable(self, length: int) -> bool:
        return super().cuttable(length) and (
            not self.is_initialized or all(room.length >= length for room in self._rooms)
        )

    def cut(self, length: int) -> None:
        super().cut(length)
        self.keys, self.values = (room.cut(length) for room in self._rooms)

    def rows(self, length: int) -> Copied:
        return [*super().rows(length), *(room.copied(length) for room in self._rooms)]

    def put_rows(self, copied: Iterator[Any], length: int) -> None:
        super().put_rows(copied, length)
        self.keys, self.values = (room.put(next(copied), length) for room in self._rooms)


class ReservedWindow(Reserved, DynamicSlidingWindowLayer):
    """Sliding window: the last `window` keys and values; the current token's own come with the call."""

    keys: Any  # a tensor; None before the first pass
    values: Any

    def _reserve(self, context: int) -> None:
        super()._reserve(context)
        self.window = max(1, self.sliding_window - 1)
        room = min(context, self.window)
        self.momentary = self.momentary or room < context
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

    def drop(self) -> None:
        super().drop()
        if self.is_initialized:
            self.keys, self.values = self.keys.clone(), self.values.clone()  # of no positions: views of nothing
        for room in self._rooms:
            room.drop()

    def like(self, other: Any) -> None:
        super().like(other)
        if _initialize(self, other):
            self._sliding_window_tensor = other._sliding_window_tensor.clone()
            self.keys, self.values = other.keys[:, :, :0].clone(), other.values[:, :, :0].clone()

    def cuttable(self, length: int) -> bool:
        whole = self.window is not None and self.cumulative_length <= self.window  # none has left it
        return super().cuttable(length) and (
            not self.is_initialized or (whole and all(room.length >= length for room in self._rooms))
        )

    def cut(self, length: int) -> None:
        super().cut(length)
        if self.is_initialized and self.cumulative_length > length:
            self.keys, self.values = (room.cut(length) for room in self._rooms)
            self.cumulative_length = length

    def moment(self) -> Copied:
        return [*super().moment(), self.cumulative_length, *(room.copied(room.length) for room in self._rooms)]

    def put_moment(self, copied: Iterator[Any], most: int | None = None) -> None:
        super().put_moment(copied, most)
        self.cumulative_length = next(copied)
        kept = [(room, next(copied)) for room in self._rooms]
        if most is not None and self.cumulative_length > most:
            self.cumulative_length = most
        if self.is_initialized:
            self.keys, self.values = (room.put(copy, most) for room, copy in kept)


class ReservedStates(Reserved, LinearAttentionLayer):
    """Linear attention and short convolutions: states whose size does not depend on the context."""

    momentary = True

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        super().lazy_initialization(*args, **kwargs)
        self.state_bytes = sum(t.numel() * t.itemsize for t in self.states())

    def states(self) -> list[torch.Tensor]:
        """The states, once the first pass has allocated them."""
        return [t for t in (*self.conv_states.values(), *self.recurrent_states.values()) if t is not None]

    def like(self, other: Any) -> None:
        super().like(other)
        for at, conv in other.conv_states.items():
            if conv is not None and self.conv_states[at] is None:
                self.lazy_initialization(conv_states=conv, state_idx=at, conv_kernel_size=other.conv_kernel_size[at])
        for at, recurrent in other.recurrent_states.items():
            if recurrent is not None and self.recurrent_states[at] is None:
                self.lazy_initialization(recurrent_states=recurrent, state_idx=at)

    def clear(self) -> None:
        super().clear()
        LinearAttentionLayer.reset(self)

    def cuttable(self, length: int) -> bool:
        return False

    def moment(self) -> Copied:
        return [
            *super().moment(),
            dict(self.has_previous_state),
            [None if t is None else on_host(t) for t in self._all()],
        ]

    def put_moment(self, copied: Iterator[Any], most: int | None = None) -> None:
        super().put_moment(copied, most)
        self.has_previous_state = dict(next(copied))
        for state, copy in zip(self._all(), next(copied), strict=True):
            if state is not None:
                state.zero_() if copy is None else state.copy_(copy)

    def _all(self) -> list[torch.Tensor | None]:
        return [*self.conv_states.values(), *self.recurrent_states.values()]


class ReservedHybrid(ReservedStates, ReservedLayer, LinearAttentionAndFullAttentionLayer):
    """States and full attention."""


class ReservedHybridWindow(ReservedStates, ReservedWindow, LinearAttentionAndSlidingWindowAttentionLayer):
    """States and a sliding window."""


class ReservedIndexed(ReservedLayer, cache_utils.DynamicIndexedLayer):
    """Full attention that selects positions by a small index [batch, context, dim]."""

    indexer_keys: Any  # a tensor; None before the first pass

    def _reserve(self, context: int) -> None:
        super()._reserve(context)
        self._index = ReservedTensor(context, 1)

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """Append [batch, n, dim] and return everything so far."""
        keys = self._index.append(indexer_key_states)
        self.indexer_keys, self.is_indexer_initialized = keys, True
        return keys

    @property
    def growing_bytes(self) -> int:
        positions = getattr(self, "indexer_position_ids", None)  # some models store these on one layer
        return super().growing_bytes + self._index.bytes + (0 if positions is None else positions.nbytes)

    def clear(self) -> None:
        super().clear()
        self._index.length = 0
        self.indexer_position_ids = None

    def drop(self) -> None:
        super().drop()
        self.indexer_keys = None
        self._index.drop()

    def like(self, other: Any) -> None:
        super().like(other)
        self._index.like(other._index)
        self.is_indexer_initialized = self.is_indexer_initialized or other.is_indexer_initialized

    def cuttable(self, length: int) -> bool:
        return super().cuttable(length) and (not self.is_indexer_initialized or self._index.length >= length)

    def cut(self, length: int) -> None:
        super().cut(length)
        self.indexer_keys = self._index.cut(length)
        if self.indexer_position_ids is not None:
            self.indexer_position_ids = self.indexer_position_ids[..., :length]

    def rows(self, length: int) -> Copied:
        positions = self.indexer_position_ids
        own = None if positions is None else on_host(positions[..., :length])
        return [*super().rows(length), self._index.copied(length), own]

    def put_rows(self, copied: Iterator[Any], length: int) -> None:
        super().put_rows(copied, length)
        self.indexer_keys, positions = self._index.put(next(copied), length), next(copied)
        device = None if self.indexer_keys is None else self.indexer_keys.device
        self.indexer_position_ids = None if positions is None else positions[..., :length].to(device)


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


def _initialize(own: Any, other: Any) -> bool:
    """A layer with keys and values is as if it had been used where `other` was; whether it was not before."""
    if own.is_initialized or not other.is_initialized:
        return False
    own.dtype, own.device, own.is_initialized = other.dtype, other.device, True
    for room, theirs in zip(own._rooms, other._rooms, strict=True):
        room.like(theirs)
    return True


def _reserved(layer: Any, context: int) -> Reserved:
    kind = RESERVED[type(layer)]
    own = kind.__new__(kind)
    vars(own).update(vars(layer))  # attributes that transformers set from the config, in any version
    own._reserve(context)
    return own
