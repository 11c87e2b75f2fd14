"""KV cache layers of fixed size: the memory that the budget reserved is allocated once and reused.

transformers' own layers concatenate the whole cache for every token; these write in place. The states of linear
attention and short convolutions have one size for every context: transformers' own code, or a pass by address, keeps
them, and this module counts their bytes. A layer of any other kind is refused by name, because its size cannot be
guaranteed.
"""

import sys
from collections.abc import Iterator, Sequence
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
from core.hf.reserved_layers import CPU, Copied, Held, Part, Reserved, ReservedLayer, noise
from core.hf.reserved_tensor import Allocated, ReservedTensor, on_host
from core.hf.reserved_window import ReservedWindow


class ReservedStates(Reserved, LinearAttentionLayer):
    """Linear attention and short convolutions: states whose size does not depend on the context."""

    momentary = True

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        super().lazy_initialization(*args, **kwargs)
        before, self.state_bytes = self.state_bytes, sum(t.numel() * t.itemsize for t in self.states())
        self.allocated.bytes += self.state_bytes - before

    def allocate(self, parts: Sequence[Part], device: torch.device = CPU) -> None:
        *others, (conv, dtype), (recurrent, other) = parts
        super().allocate(others, device)
        if self.conv_states[0] is None:
            self.lazy_initialization(conv_states=torch.empty(1, *conv, dtype=dtype, device=device))
        if self.recurrent_states[0] is None:
            self.lazy_initialization(recurrent_states=torch.empty(1, *recurrent, dtype=other, device=device))

    def grow(self, count: int) -> None:
        super().grow(count)
        for at in self.conv_states:
            self.has_previous_state[at] = True

    def held(self) -> Held:
        positions, others = super().held()
        return Held(positions, (*others, *(state.data_ptr() for state in self.states())))

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

    @property
    def revocable(self) -> int:
        # passes by address leave them as they were, until it is known how many rows stay (`KVCache.hold`)
        return sys.maxsize if type(self) is ReservedStates else 0

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
    indexer_position_ids: Any  # likewise; None in models that do not keep them
    given = True

    def _reserve(self, context: int) -> None:
        super()._reserve(context)
        self._index = ReservedTensor(context, 1, self.allocated)

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """Append [batch, n, dim] and return everything so far."""
        keys = self._index.append(indexer_key_states)
        self.indexer_keys, self.is_indexer_initialized = keys, True
        return keys

    def lengthen(self, count: int, draw: torch.Generator) -> None:
        super().lengthen(count, draw)
        if self.is_indexer_initialized:
            self.update_indexer(noise(self.indexer_keys, 1, count, draw))
        if self.indexer_position_ids is not None:
            last = self.indexer_position_ids[..., -1:]
            more = last + torch.arange(1, count + 1, device=last.device)
            self.indexer_position_ids = torch.cat((self.indexer_position_ids, more), -1)

    @property
    def growing_bytes(self) -> int:
        return super().growing_bytes + self._index.bytes + self.given_bytes

    @property
    def given_bytes(self) -> int:
        positions = getattr(self, "indexer_position_ids", None)  # some models store these on one layer
        return 0 if positions is None else int(positions.nbytes)

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


def reserve(cache: DynamicCache, context: int, allocated: Allocated | None = None) -> list[Reserved]:
    """Replace every layer of a new cache by one of fixed size, for `context` positions, and return these: one per layer
    of the model, which count in `allocated` what they allocate. Raises ModelError for an unsupported kind of layer,
    leaving the cache unchanged."""
    for layer in cache.layers:
        if type(layer) not in RESERVED:
            raise ModelError(f"it keeps a state, {type(layer).__name__}, that Moestro does not know")
    allocated = allocated or Allocated()
    own = [_reserved(layer, context, allocated) for layer in cache.layers]
    cache.layers = list(own)
    return own


def _reserved(layer: Any, context: int, allocated: Allocated) -> Reserved:
    kind = RESERVED[type(layer)]
    own = kind.__new__(kind)
    vars(own).update(vars(layer))  # attributes that transformers set from the config, in any version
    own.allocated = allocated
    own._reserve(context)
    return own
