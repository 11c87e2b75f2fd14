"""Recognises a model's decoder layers by their structure, and binds their weights: what the program computes with.

A form is a guess until the modules were tried on random states, and the whole model on a text.
"""

import functools
import inspect
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import nn

from core.errors import ModelError
from core.hf.cache import reserve
from core.hf.discover import ExpertsSite
from core.hf.head import MtpHead
from core.hf.reserved_layers import Part, Reserved
from core.hf.reserved_tensor import Allocated
from core.hf.text_to_text import empty_cache
from core.runtime.program import beside
from core.runtime.program.attention import attention_of
from core.runtime.program.delta_net import delta_net_of
from core.runtime.program.feed_forward import Dense, Routed, dense_of, routed_of
from core.runtime.program.latent_attention import LATENT, latent_of
from core.runtime.program.mixer import Mixer
from core.runtime.program.trial import Angles
from core.runtime.program.weights import FP32, NormWeight, Weight, forward, known, near, norm_of, weight_of
from core.system.text_config import text_config
from core.system.wording import reason

log = logging.getLogger("moestro.load")

PART = "language_model"
BLOCKS = "mlp", "block_sparse_moe"
SHARED = "shared_mlp"
NORMS = "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
ROTATIONS = "default", "linear", "llama3", "yarn", "proportional"  # of angles that no text's length changes
HEAD = "enorm", "hnorm", "eh_proj", "shared_head"  # around the layer of a head
PLACES = (  # of norms: before the mixer, of what it adds, before the rest, of what that adds
    ("input_layernorm", "", "post_attention_layernorm", ""),
    ("", "post_attention_layernorm", "", "post_feedforward_layernorm"),
    ("input_layernorm", "post_attention_layernorm", "pre_mlp_layernorm", "post_mlp_layernorm"),
    ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),
)


@dataclass(frozen=True, slots=True)
class Layer:
    """A decoder layer. Its mixer and its rest read the residual stream, normed where there is a norm before them.
    `mixed` and `added` are norms of what they add to it; it is multiplied by `factor` [1], fp32, at last."""

    before: NormWeight | None
    mixer: Mixer
    after: NormWeight | None
    after_module: nn.Module | None  # this norm, whose hooks get the residual stream
    rest: Dense | Routed
    mixed: NormWeight | None = None
    added: NormWeight | None = None
    factor: torch.Tensor | None = None

    @property
    def dense(self) -> Dense | None:
        """What is computed for every token."""
        return self.rest.shared if isinstance(self.rest, Routed) else self.rest


@dataclass(frozen=True, slots=True)
class Form:
    """A whole model. Embeddings, what layers add to the residual stream, and logits are multiplied by a number each."""

    embedding: nn.Module
    layers: tuple[Layer, ...]
    norm: NormWeight
    head: Weight
    hidden: int
    context: int
    dtype: torch.dtype
    embedding_scale: float
    residual_scale: float
    logits_scale: float
    logits_cap: float  # logits become cap * tanh(logits / cap); 0 = none

    @property
    def parts(self) -> tuple[tuple[Part, ...], ...]:
        """What each layer keeps in the KV cache."""
        return tuple([layer.mixer.parts for layer in self.layers])

    @property
    def inner(self) -> int:
        """Neurons of the widest layer that is computed for every token."""
        return max((layer.dense.down.inputs for layer in self.layers if layer.dense is not None), default=0)


class Place(Protocol):
    """Where modules are tried, and where what is bound of them is."""

    def module(self, module: Any) -> Any:
        """A module in host memory, the same one or a copy."""

    def site(self, site: ExpertsSite) -> ExpertsSite:
        """A site of a module that was asked for, with what that is there."""

    def placed(self, bound: Any) -> Any:
        """What was bound of such modules, with addresses and tensors of where the model is."""


class Here:
    """A model in host memory."""

    def module(self, module: Any) -> Any:
        return module

    def site(self, site: ExpertsSite) -> ExpertsSite:
        return site

    def placed(self, bound: Any) -> Any:
        return bound


HERE = Here()


def bind(model: Any, sites: Sequence[ExpertsSite], context: int, place: Place = HERE) -> Form:
    """The form of a model for texts of up to `context` tokens. Raises ModelError, with what is not known."""
    try:
        return _bind(model, sites, context, place)
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:  # of modules that are called in another way
        log.debug("A trial of the model's modules broke off", exc_info=True)
        raise ModelError(f"its modules could not be tried: {reason(error)}") from error


def _bind(model: Any, sites: Sequence[ExpertsSite], context: int, place: Place) -> Form:
    known(model, ("model", "lm_head"))
    if getattr(text_config(model.config), "attention_chunk_size", None):
        raise ModelError("attention within chunks of the text is not known")
    inner: Any = model.model
    if hasattr(inner, PART):  # of a model whose other parts are left out
        known(inner, (PART,))
        inner = getattr(inner, PART)
    known(inner, ("embed_tokens", "layers", "norm", "rotary_emb"))
    by_parent = {id(site.parent): site for site in sites}
    angles = functools.cache(functools.partial(_angles, place.module(inner.rotary_emb), context))
    embedding, dtype = inner.embed_tokens, model.dtype
    kept = reserve(empty_cache(model.config), context)
    kinds = getattr(text_config(model.config), "layer_types", None) or [""] * len(kept)
    found = tuple(
        [
            _layer_at(place, layer, by_parent, functools.partial(angles, kind), own, dtype)
            for layer, own, kind in zip(inner.layers, kept, kinds, strict=True)
        ]
    )
    if by_parent:
        raise ModelError("there are experts outside the decoder's layers")
    residual = {float(getattr(layer, "residual_multiplier", 1.0)) for layer in inner.layers}
    if len(residual) > 1:
        raise ModelError("layers with different multipliers are not known")
    multiplied = residual != {1.0} or any(layer.factor is not None for layer in found)
    if multiplied and any(layer.before is None or layer.after is None for layer in found):
        raise ModelError("multipliers without a norm before what reads the residual stream are not known")
    scales = (
        float(getattr(inner, "embedding_multiplier", 1.0)) * _factor(embedding),
        *residual,
        1 / float(getattr(model, "logits_scaling", 1)),
        float(getattr(text_config(model.config), "final_logit_softcapping", None) or 0),
    )
    hidden, norm = embedding.weight.shape[1], place.placed(norm_of(place.module(inner.norm)))
    return Form(embedding, found, norm, weight_of(model.lm_head, tried=False), hidden, context, dtype, *scales)


def bind_head(head: MtpHead, context: int) -> tuple[Layer, NormWeight]:
    """The layer of a head, and the norm after it. Raises ModelError, with what is not known."""
    layer = nn.Module()
    for name, one in head.layer.named_children():
        if name not in HEAD:
            layer.add_module(name, one)
    angles = functools.partial(_angles, head.inner.rotary_emb, context, head.window[1])
    kept, dtype = head.cache(context, Allocated()).layer, head.layer.eh_proj.weight.dtype
    try:
        bound = _layer(
            layer, {id(one.parent): one for one in (head.site,) if one is not None}, angles, kept, dtype, head.window[0]
        )
        return bound, norm_of(head.layer.shared_head.norm)
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        raise ModelError(f"the head's modules could not be tried: {reason(error)}") from error


@torch.inference_mode()
def _factor(embedding: Any) -> float:
    """What a model's embeddings are multiplied by."""
    if not isinstance(embedding, nn.Embedding):
        raise ModelError(f"embeddings of the kind {type(embedding).__name__} are not known")
    factor = float(getattr(embedding, "embed_scale", torch.ones(1)).to(embedding.weight.dtype))
    if not near(forward(embedding, torch.arange(2, device=embedding.weight.device)), embedding.weight[:2] * factor):
        raise ModelError(f"embeddings of the kind {type(embedding).__name__} are not known")
    return factor


def _layer_at(
    place: Place,
    layer: Any,
    sites: dict[int, ExpertsSite],
    angles: Callable[[], Angles],
    kept: Reserved,
    dtype: torch.dtype,
) -> Layer:
    """A layer that is tried in a place; its sites are taken from `sites`."""
    inside = [sites.pop(id(one)) for one in layer.modules() if id(one) in sites]
    tried = place.module(layer)
    here = {id(one.parent): one for one in map(place.site, inside)}
    found: Layer = place.placed(_layer(tried, here, angles, kept, dtype))
    if here:
        raise ModelError("there are experts in other parts of a layer than is known")
    return found


def _layer(
    layer: Any,
    sites: dict[int, ExpertsSite],
    angles: Callable[[], Angles],
    kept: Reserved,
    dtype: torch.dtype,
    window: int = 0,
) -> Layer:
    """`sites`: those of the layer, by their blocks; `kept`: what the KV cache has of the layer, of which no more than
    the `window` is read."""
    mixer: Mixer
    if delta := hasattr(layer, "linear_attn"):
        mixer = delta_net_of(layer.linear_attn, kept, dtype)
    else:
        found = layer.self_attn, angles(), kept, dtype
        mixer = latent_of(*found) if hasattr(layer.self_attn, LATENT) else attention_of(*found, window)
    if (site := sites.pop(id(layer), None)) is not None:
        return _beside(layer, mixer, site, dtype)
    block = next((name for name in BLOCKS if hasattr(layer, name)), BLOCKS[0])
    of = {name for name, _ in layer.named_children() if "norm" in name}
    places = next((names for names in PLACES if of == {*names} - {""}), PLACES[0])
    beside = getattr(layer, SHARED, None)  # the expert that all tokens share, outside the block
    own = [] if beside is None else [SHARED]
    known(layer, ("linear_attn" if delta else "self_attn", block, *own, *filter(None, places)))
    before, mixed, after, added = [norm_of(getattr(layer, name)) if name else None for name in places]
    site = sites.pop(id(getattr(layer, block)), None)
    rest = dense_of(getattr(layer, block), dtype) if site is None else routed_of(site, dtype)
    if beside is not None:
        if not isinstance(rest, Routed) or rest.shared is not None:
            raise ModelError("a dense layer beside another one is not known")
        rest = replace(rest, shared=dense_of(beside, dtype))
    return Layer(
        before,
        mixer,
        after,
        getattr(layer, places[2]) if places[2] else None,
        rest,
        mixed,
        added,
    )


def _beside(layer: Any, mixer: Mixer, site: ExpertsSite, dtype: torch.dtype) -> Layer:
    """A layer with experts beside its dense part, and norms of what is added."""
    known(layer, ("self_attn", *NORMS, *beside.PARTS))
    before, mixed, after, added = (norm_of(getattr(layer, name)) for name in NORMS)
    factor = layer.layer_scalar.detach().float().contiguous()
    rest = beside.beside_of(site, layer, dtype)
    return Layer(before, mixer, after, layer.pre_feedforward_layernorm, rest, mixed, added, factor)


@torch.inference_mode()
def _angles(module: Any, context: int, kind: str) -> Angles:
    """Those of layers of a kind."""
    types = getattr(module, "rope_type", None)
    if (types[kind] if isinstance(types, dict) and kind in types else types) not in ROTATIONS:
        raise ModelError("rotary embeddings whose angles depend on the text's length are not known")
    by_kind = "layer_type" in inspect.signature(type(module).forward).parameters
    of = functools.partial(module, layer_type=kind) if by_kind else module
    found = of(torch.empty(1, dtype=FP32), torch.arange(context)[None])
    if isinstance(found, torch.Tensor) and found.is_complex():
        return Angles(of, *(one[0].float().contiguous() for one in (found.real, found.imag)))
    if not isinstance(found, tuple) or len(found) != 2 or any(one.is_complex() for one in found):
        raise ModelError("rotary embeddings that are not a cosine and a sine are not known")
    half = found[0].shape[-1] // 2
    for first, second in ((slice(half), slice(half, None)), (slice(0, None, 2), slice(1, None, 2))):
        if all(torch.equal(one[..., first], one[..., second]) for one in found):  # each angle twice
            found = [one[..., first] for one in found]
            break
    cos, sin = (one[0].float().contiguous() for one in found)
    return Angles(of, cos, sin)
