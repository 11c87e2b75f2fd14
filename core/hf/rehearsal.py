"""Passes of a meta model, watched: what layers that keep a state need and do, which no config says.

Nothing is allocated and nothing computed: shapes go through the model's own code, up to the first such layer.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache

from core.hf.cache import Reserved, ReservedStates, reserve

TOKENS = (32, 128, 512)   # lengths of a chunk that are rehearsed


class StateLayers(NamedTuple):
    """What a model's state layers do with a chunk of a prompt. Without such layers: nothing."""

    carried: bool = True                             # a chunk goes on from the state that the one before left
    activations: tuple[tuple[int, int], ...] = ()    # (tokens, most bytes alive at once), lengths ascending

    def bytes(self, tokens: int) -> int:
        """Most bytes of activations in a chunk of `tokens`, from the rehearsed length that is not shorter."""
        if not self.activations:
            return 0
        longest, most = self.activations[-1]
        return next((peak for length, peak in self.activations if length >= tokens), most * -(-tokens // longest))


def rehearse(meta: Any, layers: Iterable[Reserved]) -> StateLayers:
    """Watch the first of `layers` (the model's cache in order, used once) that allocated a state."""
    first = next((i for i, layer in enumerate(layers) if layer.state_bytes), None)
    if first is None:
        return StateLayers()
    cache = _cache(meta, 3)
    _run(meta, cache, 1, first)
    layer = cache.layers[first]
    assert isinstance(layer, ReservedStates)
    watched = [t.untyped_storage()._cdata for t in layer.states()]
    with _Watch(watched) as second:
        _run(meta, cache, 2, first)
    peaks = []
    for tokens in TOKENS:
        with _Watch() as watch:
            _run(meta, _cache(meta, tokens), tokens, first)
        peaks.append((tokens, watch.peak_bytes))
    return StateLayers(set(watched) <= second.read, tuple(peaks))


def _cache(meta: Any, context: int) -> DynamicCache:
    cache = DynamicCache(config=meta.config)
    reserve(cache, context)
    return cache


class _Enough(Exception):
    """The layer of interest has run."""


def _run(meta: Any, cache: DynamicCache, tokens: int, layer: int) -> None:
    """One pass, broken off after the first module that says it belongs to `layer`."""
    module = next((m for m in meta.modules() if getattr(m, "layer_idx", None) == layer), meta)
    handle = module.register_forward_hook(_stop)
    try:
        meta(torch.zeros(1, tokens, dtype=torch.long, device="meta"), past_key_values=cache, use_cache=True)
    except _Enough:
        pass
    finally:
        handle.remove()


def _stop(*args: object) -> None:
    raise _Enough


class _Watch(TorchDispatchMode):
    """Counts the bytes of tensors that operations made and that are alive, and notes which storages were read."""

    def __init__(self, storages: Iterable[int] = ()) -> None:
        super().__init__()
        self._of_interest = frozenset(storages)
        self._alive: dict[int, int] = {}
        self._now = self.peak_bytes = 0
        self.read: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        read = args[1:] if func is torch.ops.aten.copy_.default else args
        for tensor in _tensors((read, kwargs)):
            self.read |= {tensor.untyped_storage()._cdata} & self._of_interest
        inputs = {t.untyped_storage()._cdata for t in _tensors((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key not in inputs and key not in self._alive:
                self._alive[key] = storage.nbytes()
                self._now += self._alive[key]
                weakref.finalize(storage, self._free, key)
        self.peak_bytes = max(self.peak_bytes, self._now)
        return result

    def _free(self, key: int) -> None:
        self._now -= self._alive.pop(key)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
