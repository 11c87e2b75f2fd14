"""Layers of the KV cache that keep a window of keys and values, in memory of a fixed size: see `core.hf.cache`."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers.cache_utils import DynamicSlidingWindowLayer

from core.hf.reserved_layers import CPU, Copied, Part, ReservedPair, initialize, noise
from core.hf.reserved_tensor import ReservedTensor

BLOCK = 64  # positions that passes by address read together


class ReservedWindow(ReservedPair, DynamicSlidingWindowLayer):
    """Sliding window: the last keys and values but the current token's own, which come with the call. A pass by address
    writes them too, position p where p modulo the `window` positions of the memory lies: of a pass over more than
    `window - sliding_window + 1` rows, these are written and read in parts."""

    def _reserve(self, context: int) -> None:
        super()._reserve(context)
        self._kept = max(1, self.sliding_window - 1)
        self.window = -(-(self.sliding_window + BLOCK - 1) // BLOCK) * BLOCK
        room = min(context, self.window)
        self._by_address = False
        self.momentary = self.momentary or self._kept < context
        self._rooms = ReservedTensor(room, 2, self.allocated), ReservedTensor(room, 2, self.allocated)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the window's content followed by [batch, heads, n, dim], and keep the last positions of both."""
        full: tuple[torch.Tensor, torch.Tensor] = super().update(key_states, value_states, *args, **kwargs)
        self.keys, self.values = (room.keep_last(t, self._kept) for room, t in zip(self._rooms, full, strict=True))
        return full

    def allocate(self, parts: Sequence[Part], device: torch.device = CPU) -> None:
        keys, values = (torch.empty(1, heads, 0, width, dtype=dtype, device=device) for (heads, width), dtype in parts)
        if self._rooms[0].memory is None:
            self.update(keys, values)
        self._by_address = True

    @property
    def revocable(self) -> int:
        return int(self.window - self.sliding_window)

    def grow(self, count: int) -> None:
        super().grow(count)
        self.cumulative_length += count
        self.keys, self.values = (room.filled(self.cumulative_length) for room in self._rooms)

    def lengthen(self, count: int, draw: torch.Generator) -> None:
        super().lengthen(count, draw)
        if self._by_address:
            for room, of in zip(self._rooms, (self.keys, self.values), strict=True):
                assert room.memory is not None
                room.memory.copy_(noise(of, 2, room.memory.shape[2], draw))
            self.grow(count)
        elif self.is_initialized:
            self.update(noise(self.keys, 2, count, draw), noise(self.values, 2, count, draw))

    def clear(self) -> None:
        super().clear()
        self.cumulative_length = 0
        if self.is_initialized:
            self.keys, self.values = self.keys[:, :, :0], self.values[:, :, :0]

    def drop(self) -> None:
        super().drop()
        self._by_address = False
        if self.is_initialized:
            self.keys, self.values = self.keys.clone(), self.values.clone()  # of no positions: views of nothing
        for room in self._rooms:
            room.drop()

    def like(self, other: Any) -> None:
        super().like(other)
        if initialize(self, other):
            self._sliding_window_tensor = other._sliding_window_tensor.clone()
            self.keys, self.values = other.keys[:, :, :0].clone(), other.values[:, :, :0].clone()

    def cuttable(self, length: int) -> bool:
        kept = self.window if self._by_address else self._kept
        whole = kept is not None and self.cumulative_length <= kept  # none has left it
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
