"""Several sequences in one forward pass of a transformers model, with nothing padded.

Their tokens are given as one row [1, T], with the position of each in its own sequence. What computes a token by itself
(norms, projections, routers, experts) takes all rows at once. What mixes tokens is computed one sequence after the
other, over that one's own KV cache and with the mask that it would have alone: attention between the projections around
it, and other mixers (linear attention, short convolutions, attention that chooses positions) as whole modules.
"""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, DynamicCache
from transformers.cache_utils import DynamicLayer
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_layers import GradientCheckpointingLayer

from core.errors import ModelError
from core.hf.cached_pass import cached_pass
from core.hf.decode_attention import ATTENTION, REGISTRY
from core.hf.reserved_layers import ReservedLayer, ReservedWindow
from core.memory.to_device import to_device

CACHES = ("past_key_values", "past_key_value", "cache_params", "cache")
"""What a mixer's argument for the KV cache may be called."""
KEPT = (ReservedLayer, ReservedWindow)  # cache layers of plain attention: keys and values, and nothing else
EAGER = "eager_attention_forward"  # a modelling file's own attention
FORWARD = "forward"  # attribute of a module that shadows its class's method
POSITIONS = "indexer_position_ids"  # attribute of a cache layer
LATENT = "kv_lora_rank"  # marks attention whose keys are made from what the cache holds: more than it was given

_numbers = itertools.count(1)


class PerSequence(tuple[Any, ...]):
    """What cannot be joined to rows, of each sequence of a pass, in its order: an attention mask (None = none is
    needed), or what a mixer chose or keeps for later layers."""


@dataclass(frozen=True, slots=True)
class Mixer:
    """A module that mixes tokens: it is given the KV cache, of which it uses layer `index`."""

    module: nn.Module
    index: int
    names: tuple[str, ...]  # of the parameters of its forward
    attends: bool  # by the function that transformers' registry names, over keys and values as the cache keeps them


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
                return _joined([forward(**share) for share in shares], cache.counts)

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


def _dims(tensor: torch.Tensor) -> Sequence[int]:
    """Where a tensor's rows may be: [T], [1, T, ...] or [n, 1, T]."""
    return (0,) if tensor.ndim == 1 else (1,) if tensor.ndim == 2 else (1, 2)


def _joined(outs: Sequence[Any], counts: Sequence[int]) -> Any:
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
