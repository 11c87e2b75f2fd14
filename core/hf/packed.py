"""Several sequences in one forward pass of a transformers model, with nothing padded.

Their tokens are given as one row [1, T], with the position of each in its own sequence. What computes a token by itself
(norms, projections, routers, experts) takes all rows at once. What mixes tokens is computed one sequence after the
other, over that one's own KV cache and with the mask that it would have alone: attention between the projections around
it, and other mixers (linear attention, short convolutions, attention that chooses positions) as whole modules.
"""

import functools
import inspect
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, DynamicCache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_layers import GradientCheckpointingLayer

from core.errors import ModelError
from core.hf.cached_pass import cached_pass
from core.hf.decode_attention import ATTENTION, REGISTRY
from core.hf.packed_cache import PackedCache, PackedLayer, PerSequence, joined
from core.hf.reserved_layers import ReservedLayer
from core.hf.reserved_window import ReservedWindow
from core.memory.to_device import to_device

CACHES = ("past_key_values", "past_key_value", "cache_params", "cache")
"""What a mixer's argument for the KV cache may be called."""
KEPT = (ReservedLayer, ReservedWindow)  # cache layers of plain attention: keys and values, and nothing else
EAGER = "eager_attention_forward"  # a modelling file's own attention
FORWARD = "forward"  # attribute of a module that shadows its class's method
POSITIONS = "indexer_position_ids"  # attribute of a cache layer
LATENT = "kv_lora_rank"  # marks attention whose keys are made from what the cache holds: more than it was given

_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Mixer:
    """A module that mixes tokens: it is given the KV cache, of which it uses layer `index`."""

    module: nn.Module
    index: int
    names: tuple[str, ...]  # of the parameters of its forward
    attends: bool  # by the function that transformers' registry names, over keys and values as the cache keeps them


class Packing:
    """Passes of one model over several sequences, one pass at a time. What a pass changes in the model is put back when
    it ends. `experts`: the model's experts modules, which take the rows of all sequences."""

    def __init__(self, model: Any, experts: Sequence[nn.Module]) -> None:
        self._model, self._experts, self._name = model, tuple(experts), f"moestro_packed_{next(_numbers)}"
        self._usual = ""  # the model's own attention, in transformers' registry
        self._cache: PackedCache | None = None

    def compute(
        self,
        tokens: Sequence[Sequence[int]],
        lengths: Sequence[int],
        caches: Sequence[DynamicCache],
        device: torch.device,
        keep: int,
    ) -> torch.Tensor:
        """The next `tokens` [t] of each sequence, which follow the `lengths` that its cache holds -> logits [keep, V]
        of the last rows of each, one sequence after the other."""
        counts = [len(some) for some in tokens]
        ends = [*itertools.accumulate(counts)]
        rows = [row for end in ends for row in range(end - keep, end)]
        positions = [at for length, count in zip(lengths, counts, strict=True) for at in range(length, length + count)]
        with self._over(caches, counts) as cache, _positions(caches, counts) as cache.history:
            output = cached_pass(
                self._model,
                to_device([[token for some in tokens for token in some]], device),
                cache,
                position_ids=to_device([positions], device),
                logits_to_keep=to_device(rows, device),
            )
        logits: torch.Tensor = output.logits[0]
        return logits

    # ------------------------------------------------------------------ what a pass changes

    @functools.cached_property
    def _configs(self) -> list[Any]:
        return list({id(one): one for one in map(_config, self._model.modules()) if one is not None}.values())

    @functools.cached_property
    def _mixers(self) -> list[Mixer]:
        return list(_mixers(self._model, self._experts))

    @contextmanager
    def _over(self, caches: Sequence[DynamicCache], counts: Sequence[int]) -> Iterator[PackedCache]:
        """Inside, the model computes several sequences."""
        layers = caches[0].layers
        packed = {one.index for one in self._mixers if one.attends and type(layers[one.index]) in KEPT}
        looped = [one for one in self._mixers if one.index not in packed]
        self._cache = cache = PackedCache(caches, counts, [at in packed for at in range(len(layers))])
        before = [one._attn_implementation_internal for one in self._configs]
        shadowed = [vars(mixer.module).get(FORWARD) for mixer in looped]
        self._usual = next((name for name in before if name), "eager")
        AttentionInterface.register(self._name, self._attention)
        AttentionMaskInterface.register(self._name, self._masks)
        try:
            for config in self._configs:
                config._attn_implementation_internal = self._name
            for mixer in looped:
                mixer.module.forward = self._each(mixer, mixer.module.forward)
            yield cache
        finally:
            for mixer, own in zip(looped, shadowed, strict=True):
                vars(mixer.module).pop(FORWARD, None)
                if own is not None:
                    vars(mixer.module)[FORWARD] = own
            for config, name in zip(self._configs, before, strict=True):
                config._attn_implementation_internal = name
            AttentionInterface._global_mapping.pop(self._name, None)
            AttentionMaskInterface._global_mapping.pop(self._name, None)
            self._cache = None

    @property
    def _pass(self) -> PackedCache:
        assert self._cache is not None, "no pass over several sequences is under way"
        return self._cache

    def _masks(self, **sizes: Any) -> PerSequence | None:
        """Takes the place of the model's function for masks: each sequence's as that function makes it alone."""
        make = ALL_MASK_ATTENTION_FUNCTIONS[self._usual] if self._usual in _masking() else None
        if make is None:
            return None
        layer = self._pass.mask_layer
        masks = []
        for cache, count in zip(self._pass.caches, self._pass.counts, strict=True):
            length, offset = cache.get_mask_sizes(count, layer)
            own = {"q_length": count, "kv_length": length, "kv_offset": offset}
            masks.append(make(**{**sizes, **own, "q_offset": cache.get_query_offset(layer)}))
        return None if all(mask is None for mask in masks) else PerSequence(masks)

    def _attention(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """Takes the place of the model's attention: [1, heads, T, dim] -> [1, T, heads, dim], one sequence after the
        other, by the function that it uses alone."""
        layer = self._pass.layers[module.layer_idx]
        if not isinstance(layer, PackedLayer) or layer.given is not key:
            raise ModelError(f"{type(module).__name__} attends in a way that Moestro cannot divide among sequences.")
        attend = ATTENTION.get(self._usual) or _eager(module)
        queries = query.split(self._pass.counts, 2)
        masks = attention_mask if isinstance(attention_mask, PerSequence) else (None,) * len(queries)
        outs = [
            attend(module, own, keys, values, mask, **kwargs)[0]
            for own, (keys, values), mask in zip(queries, layer.held, masks, strict=True)
        ]
        layer.held, layer.given = [], None
        return torch.cat(outs, 1), None

    def _each(self, mixer: Mixer, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Takes the place of a mixer's forward: calls it for one sequence after the other."""
        cache, config = self._pass, _config(mixer.module)

        def all_of_them(*args: Any, **kwargs: Any) -> Any:
            given = {**dict(zip(mixer.names, args, strict=False)), **kwargs}
            shares = [
                {
                    name: own if name in CACHES and value is not None else cache.share(value, at)
                    for name, value in given.items()
                }
                for at, own in enumerate(cache.caches)
            ]
            with _named(config, self._usual):
                return joined([forward(**share) for share in shares], cache.counts)

        return all_of_them


def _config(module: nn.Module) -> Any:
    config = getattr(module, "config", None)
    return config if hasattr(config, "_attn_implementation_internal") else None


@contextmanager
def _named(config: Any, name: str) -> Iterator[None]:
    """Inside, modules of `config` use the attention `name`."""
    if config is None:
        yield
        return
    before = config._attn_implementation_internal
    config._attn_implementation_internal = name
    try:
        yield
    finally:
        config._attn_implementation_internal = before


def _masking() -> Mapping[str, Any]:
    known: Mapping[str, Any] = AttentionMaskInterface._global_mapping
    return known


def _eager(module: nn.Module) -> Callable[..., Any]:
    attend: Callable[..., Any] = getattr(sys.modules[type(module).__module__], EAGER)
    return attend


def _mixers(model: Any, experts: Sequence[nn.Module]) -> Iterator[Mixer]:
    """The outermost modules that are given the KV cache, below the decoder layers and outside the experts."""
    inside = [name for name, module in model.named_modules() if any(module is one for one in experts)]
    found: list[str] = []
    for name, module in model.named_modules():  # a module comes before what it contains
        index, names = getattr(module, "layer_idx", None), tuple(inspect.signature(type(module).forward).parameters)[1:]
        if index is None or not any(one in names for one in CACHES) or any(name.startswith(one) for one in found):
            continue
        if isinstance(module, GradientCheckpointingLayer) or any(one.startswith(name + ".") for one in inside):
            continue
        found.append(name + ".")
        file = sys.modules[type(module).__module__]
        yield Mixer(module, index, names, hasattr(file, REGISTRY) and not hasattr(module, LATENT))


@contextmanager
def _positions(caches: Sequence[DynamicCache], counts: Sequence[int]) -> Iterator[Sequence[int]]:
    """Some models keep the positions of all tokens so far [n, 1, T] in a layer of the cache, append those of a pass and
    give their mixers the embeddings of all. Inside, the first sequence's layer, which is the one that a pass has, holds
    the positions of all sequences, one after the other; yields how many of each, () where there are none."""
    layers = [own for own in zip(*(cache.layers for cache in caches), strict=True) if hasattr(own[0], POSITIONS)]
    before = [[getattr(layer, POSITIONS) for layer in own] for own in layers]
    for own, kept in zip(layers, before, strict=True):
        found = [one for one in kept if one is not None]
        setattr(own[0], POSITIONS, torch.cat(found, -1) if found else None)
    used = next((kept for kept in before if any(one is not None for one in kept)), [])
    history = [0 if one is None else one.shape[-1] for one in used]
    try:
        yield history
    except BaseException:
        for own, kept in zip(layers, before, strict=True):
            setattr(own[0], POSITIONS, kept[0])
        raise
    for own, kept in zip(layers, before, strict=True):
        if (after := getattr(own[0], POSITIONS)) is not None:
            for layer, old, new in zip(own, kept, after[..., sum(history) :].split(counts, -1), strict=True):
                setattr(layer, POSITIONS, new if old is None else torch.cat((old, new), -1))
