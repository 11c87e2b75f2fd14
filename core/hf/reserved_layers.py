"""What all layers of the KV cache share, and those of full attention, in memory of a fixed size: see `core.hf.cache`.

What a layer holds can be copied to host memory and put back. Keys and values of positions can be cut to any number of
them (`rows`); a window that has lost positions, and a state, are of one moment (`moment`).
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from transformers.cache_utils import DynamicLayer

from core.errors import ModelError
from core.hf.decode_attention import FILLED
from core.hf.reserved_tensor import Allocated, ReservedTensor


class Fixed(NamedTuple):
    """How a pass over one token uses a layer without the host: it writes at `position` [1] int64, on the device, and
    attends to the first `length` positions, of which its mask leaves out those that are not filled."""

    position: torch.Tensor
    length: int


class Part(NamedTuple):
    """What a pass by address keeps of a layer: numbers [heads, width] of each position, or a state of any shape."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Held(NamedTuple):
    """Where a layer keeps its parts for such passes: the memory of `positions`, 0 where it keeps states alone. The same
    as long as these numbers are."""

    positions: int
    addresses: tuple[int, ...]


NOISE = 64  # positions
CPU = torch.device("cpu")
Copied = list[Any]  # of one layer: tensors in host memory, None where there was nothing, and numbers


class Reserved:
    """Interface of every layer here, in addition to that of transformers' cache layers.

    Created by `reserve`, which replaces a transformers layer by one of these classes and calls `_reserve`.
    """

    allocated: Allocated  # by all layers of its cache
    window: int | None = None  # maximum positions kept; None = the whole context
    state_bytes = 0  # bytes allocated independent of the context
    momentary = False  # it may hold something that cannot be cut
    given = False  # a model may give it tensors of its own, which `allocated` does not count
    fixed: Fixed | None = None  # how the running pass uses it; None: by lengths that the host knows

    @property
    def growing_bytes(self) -> int:
        """Bytes allocated in proportion to the positions kept."""
        return 0

    @property
    def given_bytes(self) -> int:
        """Of these, the bytes of what a model gave it."""
        return 0

    @property
    def fixable(self) -> bool:
        """Whether it can be used as `Fixed` says, now."""
        return False

    def lengthen(self, count: int, draw: torch.Generator) -> None:
        """Append noise in place of `count` positions, of the size of what it holds of others."""

    def allocate(self, parts: Sequence[Part], device: torch.device = CPU) -> None:
        """Have memory for these parts on a device, before a pass writes them by address."""
        assert not parts, f"{type(self).__name__} cannot be written by address"

    def grow(self, count: int) -> None:
        """A pass by address, or with `fixed`, has written `count` more positions."""

    @property
    def revocable(self) -> int:
        """How many of the last positions that passes by address have written can be taken back, and nothing that is
        read later is lost."""
        return 0

    def held(self) -> Held:
        """Where the memory is that such passes use, while it is allocated."""
        return Held(0, ())

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


class ReservedPair(Reserved):
    """Keys and values in memory of a fixed size."""

    keys: Any  # a tensor; None before the first pass
    values: Any
    _rooms: tuple[ReservedTensor, ReservedTensor]

    def held(self) -> Held:
        found = [room.memory for room in self._rooms if room.memory is not None]
        return Held(found[0].shape[2] if found else 0, tuple([memory.data_ptr() for memory in found]))

    @property
    def growing_bytes(self) -> int:
        keys, values = self._rooms
        return super().growing_bytes + keys.bytes + values.bytes


class ReservedLayer(ReservedPair, DynamicLayer):
    """Full attention: keys and values [batch, heads, context, dim]."""

    def _reserve(self, context: int) -> None:
        super()._reserve(context)
        self._context = context
        self._rooms = ReservedTensor(context, 2, self.allocated), ReservedTensor(context, 2, self.allocated)
        self.is_initialized = False

    @property
    def fixable(self) -> bool:
        return type(self) is ReservedLayer and all(room.memory is not None for room in self._rooms)

    def allocate(self, parts: Sequence[Part], device: torch.device = CPU) -> None:
        keys, values = (torch.empty(1, heads, 0, width, dtype=dtype, device=device) for (heads, width), dtype in parts)
        if self._rooms[0].memory is None:
            self.update(keys, values)

    @property
    def revocable(self) -> int:
        return self._context

    def lengthen(self, count: int, draw: torch.Generator) -> None:
        super().lengthen(count, draw)
        if self.is_initialized:
            self.update(noise(self.keys, 2, count, draw), noise(self.values, 2, count, draw))

    def grow(self, count: int) -> None:
        super().grow(count)
        keys, values = self._rooms
        self.keys, self.values = keys.grown(count), values.grown(count)

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
        setattr(found[0], FILLED, fixed.position)
        return found[0], found[1]

    def get_seq_length(self) -> int:
        if self.fixed is not None:
            raise ModelError("it uses the number of its tokens within a pass")
        return self._rooms[0].length

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
        initialize(self, other)

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


def noise(like: torch.Tensor, dim: int, count: int, draw: torch.Generator) -> torch.Tensor:
    """Random numbers as large as those of `like`, `count` along `dim`; a few positions, again and again."""
    shape = list(like.shape)
    shape[dim] = NOISE
    own = (torch.randn(shape, generator=draw) * like.float().square().mean().sqrt().cpu()).to(like)
    return own.repeat([-(-count // NOISE) if at == dim else 1 for at in range(like.ndim)]).narrow(dim, 0, count)


def initialize(own: Any, other: Any) -> bool:
    """A layer with keys and values is as if it had been used where `other` was; whether it was not before."""
    if own.is_initialized or not other.is_initialized:
        return False
    for name in ("dtype", "device"):  # the first is not kept since transformers 5.24
        if hasattr(other, name):
            setattr(own, name, getattr(other, name))
    own.is_initialized = True
    for room, theirs in zip(own._rooms, other._rooms, strict=True):
        room.like(theirs)
    return True
