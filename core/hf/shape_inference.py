"""Observes passes of a meta model to learn the memory and behaviour of layers with a state, which no config states.

Nothing is allocated or computed: only shapes pass through the model's own code, up to the first such layer.
"""

import weakref
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache

from core.hf.cache import ReservedStates, reserve
from core.hf.cached_pass import cached_pass
from core.hf.reserved_layers import Reserved
from core.hf.text_to_text import empty_cache

SHORT, LONG = 64, 256  # tokens of the two observed chunks


class StateLayers(NamedTuple):
    """Behaviour of a model's state layers on a chunk of a prompt. Models without such layers have the defaults."""

    carried: bool = True  # a chunk continues from the previous chunk's state
    short_bytes: int = 0  # peak activation bytes in a chunk of SHORT tokens ...
    long_bytes: int = 0  # ... and of LONG

    def bytes(self, tokens: int) -> int:
        """Peak activation bytes of a chunk of `tokens`; beyond LONG extrapolated by the line or parabola through zero
        and the two measurements."""
        if tokens <= LONG:
            return self.short_bytes if tokens <= SHORT else self.long_bytes
        short, long = self.short_bytes / SHORT, self.long_bytes / LONG
        bend = max(0.0, (long - short) / (LONG - SHORT))
        return int(tokens * (long + bend * (tokens - LONG)))


def rehearse(meta: Any, layers: Iterable[Reserved]) -> StateLayers:
    """Observe the first of `layers` (the model's cache in order, used once) that allocated a state."""
    first = next((i for i, layer in enumerate(layers) if layer.state_bytes), None)
    if first is None:
        return StateLayers(carried=not meta.config.is_encoder_decoder)
    cache = _cache(meta, 3)
    _run(meta, cache, 1, first)
    layer = cache.layers[first]
    assert isinstance(layer, ReservedStates)
    watched = [t.untyped_storage()._cdata for t in layer.states()]
    with _Watch(watched) as second:
        _run(meta, cache, 2, first)
    return StateLayers(set(watched) <= second.read, _peak_bytes(meta, SHORT, first), _peak_bytes(meta, LONG, first))


def _peak_bytes(meta: Any, tokens: int, layer: int) -> int:
    with _Watch() as watch:
        _run(meta, _cache(meta, tokens), tokens, layer)
    return int(watch.peak_bytes)


def _cache(meta: Any, context: int) -> DynamicCache:
    cache = empty_cache(meta.config)
    reserve(cache, context)
    return cache


class _Enough(Exception):
    """The layer of interest has run; ends the pass."""


def _run(meta: Any, cache: DynamicCache, tokens: int, layer: int) -> None:
    """One pass, stopped after the first module that belongs to `layer`."""
    module = next((m for m in meta.modules() if getattr(m, "layer_idx", None) == layer), meta)
    with suppress(_Enough), module.register_forward_hook(_stop):
        cached_pass(meta, torch.zeros(1, tokens, dtype=torch.long, device="meta"), cache)


def _stop(*args: object) -> None:
    raise _Enough


class _Watch(TorchDispatchMode):
    """Counts the live bytes of tensors created by operations, and records which storages were read."""

    def __init__(self, storages: Iterable[int] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._of_interest = frozenset(storages)
        self._alive: dict[int, int] = {}
        self._now, self.peak_bytes = 0, 0
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
