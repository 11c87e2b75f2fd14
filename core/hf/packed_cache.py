"""The KV caches of several sequences as one, and how what a pass gives to all of them is divided and joined again."""

import copy
from collections.abc import MutableMapping, Sequence
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer


class PerSequence(tuple[Any, ...]):
    """What cannot be joined to rows, of each sequence of a pass, in its order: an attention mask (None = none is
    needed), or what a mixer chose or keeps for later layers."""


class PackedLayer(DynamicLayer):
    """One layer of plain attention of all sequences: divides new keys and values among their own caches."""

    def __init__(self, own: Sequence[Any], counts: Sequence[int]) -> None:
        super().__init__()
        self.own, self._counts = own, counts
        self.is_sliding = own[0].is_sliding
        self.held: list[tuple[torch.Tensor, torch.Tensor]] = []  # of each sequence, after `update`
        self.given: torch.Tensor | None = None  # the keys of the last update

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append [1, heads, T, dim], each sequence's part to its own cache; returns what it was given."""
        parts = zip(self.own, key_states.split(self._counts, 2), value_states.split(self._counts, 2), strict=True)
        self.held = [layer.update(keys, values, *args, **kwargs) for layer, keys, values in parts]
        self.given = key_states
        return key_states, value_states

    def get_seq_length(self) -> int:
        """Of the first sequence: positions are given with the tokens, so that nothing follows from it."""
        length: int = self.own[0].get_seq_length()
        return length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Of the first sequence: masks are made with each sequence's own."""
        sizes: tuple[int, int] = self.own[0].get_mask_sizes(query_length)
        return sizes


class PackedCache(DynamicCache):
    """The KV caches of all sequences of a pass, as the model is given them. `plain`: by layer, whether it is packed;
    the other layers are the first sequence's, and only read by the model around its mixers."""

    def __init__(self, caches: Sequence[DynamicCache], counts: Sequence[int], plain: Sequence[bool]) -> None:
        super().__init__()
        self.caches, self.counts, self.mask_layer = caches, counts, 0
        self.history: Sequence[int] = ()  # positions of each that the model gives its mixers again; () = of none
        self.shared: dict[int, tuple[Any, Sequence[Any]]] = {}  # by id: what layers keep, and each sequence's own
        self.layers = [
            PackedLayer(own, counts) if packed else own[0]
            for packed, *own in zip(plain, *(cache.layers for cache in caches), strict=True)
        ]

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """The sizes of the first sequence; notes for which layer a mask is made."""
        self.mask_layer = layer_idx
        sizes: tuple[int, int] = super().get_mask_sizes(query_length, layer_idx)
        return sizes

    def share(self, value: Any, at: int) -> Any:
        """What the sequence `at` has of a mixer's argument: its rows, its own of what is kept for each sequence, and
        all of anything else."""
        if isinstance(value, PerSequence):
            return value[at]
        if isinstance(value, torch.Tensor):
            return self._rows(value, at)
        if isinstance(value, tuple):
            return tuple(self.share(one, at) for one in value)
        if isinstance(value, MutableMapping):  # layers keep in it what later layers use
            if id(value) not in self.shared:
                self.shared[id(value)] = value, [self._copy(value, other) for other in range(len(self.caches))]
            return self.shared[id(value)][1][at]
        return value

    def _copy(self, value: MutableMapping[Any, Any], at: int) -> MutableMapping[Any, Any]:
        own = copy.copy(value)
        own.update({key: self.share(one, at) for key, one in value.items()})
        return own

    def _rows(self, value: torch.Tensor, at: int) -> torch.Tensor:
        total, held = sum(self.counts), sum(self.history)
        if held and value.ndim > 1 and value.shape[1] == held + total:
            before, new = value.split((held, total), 1)
            return torch.cat((before.split(self.history, 1)[at], new.split(self.counts, 1)[at]), 1)
        dim = next((dim for dim in _dims(value) if value.shape[dim] == total), None)
        return value if dim is None else value.split(self.counts, dim)[at]


def _dims(tensor: torch.Tensor) -> Sequence[int]:
    """Where a tensor's rows may be: [T], [1, T, ...] or [n, 1, T]."""
    return (0,) if tensor.ndim == 1 else (1,) if tensor.ndim == 2 else (1, 2)


def joined(outs: Sequence[Any], counts: Sequence[int]) -> Any:
    """The outputs of all sequences as one: rows one after the other; of what has none, each sequence's own."""
    first = outs[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(list(outs), 1)
    if isinstance(first, tuple):
        return tuple(_handed_on(parts, counts) for parts in zip(*outs, strict=True))
    return first


def _handed_on(parts: Sequence[Any], counts: Sequence[int]) -> Any:
    """One of a mixer's outputs: `parts` are those of the sequences."""
    if all(part is None for part in parts):
        return None
    if not all(isinstance(part, torch.Tensor) and part.ndim > 1 for part in parts):
        return PerSequence(parts)
    alike = len({(part.shape[:1], part.shape[2:]) for part in parts}) == 1
    has_rows = all(part.shape[1] == count for part, count in zip(parts, counts, strict=True))
    return torch.cat(list(parts), 1) if alike and has_rows else PerSequence(parts)
