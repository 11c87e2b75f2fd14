"""The keys, values and states of one sequence, as long as it has the memory of a KV cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transformers import DynamicCache

from core.runtime.kv_copies import Stash

if TYPE_CHECKING:
    from core.runtime.kv_cache import KVCache


class SequenceKV:
    """Keys, values and states of the first `length` tokens of one sequence. They last as long as the sequence wants
    them, or until the memory is given to another one."""

    __slots__ = ("_cache", "length", "lossy_from", "lossy_keys", "memory", "packed", "whole")

    memory: KVCache  # that it is in

    def __init__(self, cache: DynamicCache) -> None:
        self._cache: DynamicCache | None = cache
        self.length = 0
        self.whole = True  # no pass is running, and none was aborted
        self.lossy_from: int | None = None  # tokens from here on depend on something lossy; None: all are exact
        self.lossy_keys: tuple[str, ...] = ()  # of the settings under which it was computed lossily, each once
        self.packed = False  # some of it was computed in passes over several sequences: exact up to rounding

    @property
    def exact(self) -> bool:
        """Whether nothing lossy was computed in any of the tokens."""
        return self.lossy_from is None

    def mark_lossy(self, start: int, lossy_key: str) -> None:
        """Something lossy was computed in the tokens from `start` on, under the settings that `lossy_key` names."""
        self.lossy_from = start if self.lossy_from is None else min(start, self.lossy_from)
        if lossy_key not in self.lossy_keys:
            self.lossy_keys += (lossy_key,)

    def abort_pass(self, length: int) -> None:
        """Discard the pass that followed the first `length` tokens."""
        self.length, self.whole = length, False

    def cut_to(self, length: int) -> None:
        """Only the first `length` tokens are left: what was lossy in later ones is gone with them."""
        self.length, self.whole = length, True
        if self.lossy_from is not None and self.lossy_from >= length:
            self.lossy_from, self.lossy_keys = None, ()

    def begin_as(self, other: SequenceKV | Stash, length: int) -> None:
        """The first `length` tokens are those of another."""
        self.length, self.lossy_from, self.lossy_keys = other.length, other.lossy_from, other.lossy_keys
        self.packed = other.packed
        self.cut_to(length)

    @property
    def cache(self) -> DynamicCache:
        """What transformers reads and appends to, while the memory is this sequence's."""
        assert self._cache is not None, "the memory of this KV cache was given to another sequence"
        self.memory.catch_up()
        return self._cache

    @property
    def held(self) -> bool:
        """Whether the memory is still its own."""
        return self._cache is not None

    def give_up(self) -> None:
        """The memory is given to another sequence."""
        self._cache = None
