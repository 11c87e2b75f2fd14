"""Sizes of a model, computed on a meta model: no weights are read or allocated."""

import logging
import re
from collections import Counter
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx.experimental import _config as fx

from core.errors import ModelError
from core.hf.cache import reserve
from core.hf.cached_pass import cached_pass
from core.hf.discover import ExpertsSite, find_experts, read_router
from core.hf.expert_attributes import CLOSE
from core.hf.head import head_of
from core.hf.hooks import install
from core.hf.quantized_linear import Linear, linears
from core.hf.shape_inference import StateLayers, rehearse
from core.hf.text_only import keep_text
from core.hf.text_to_text import empty_cache, encoder_layers
from core.system.text_config import text_config

log = logging.getLogger("moestro.hf")
RELATIVE = 512  # tokens: T5 was trained with so many
ALL = "meta_nonzero_assume_all_nonzero"


@dataclass(frozen=True, slots=True)
class KvLayer:
    """What one layer caches. `window` is the maximum of positions it keeps; None = the whole context."""

    bytes_per_token: int
    window: int | None
    state_bytes: int = 0  # linear attention and short convolutions: independent of the context


@dataclass(frozen=True, slots=True)
class Outline:
    """Sizes of a model in bytes, at the meta model's dtype."""

    hidden: int
    vocab: int
    context_limit: int  # maximum context length of the model
    dense_bytes: int  # parameters and buffers that are not routed experts
    kv: tuple[KvLayer, ...]
    sites: tuple[ExpertsSite, ...]
    states: StateLayers  # activation memory of a prompt chunk in layers with a state
    weights_itemsize: int  # bytes per number of the weights that routers return
    linears: tuple[Linear, ...]  # layers outside the experts that can be quantised
    closeness: float = 0.0  # maximum deviation of logits from transformers', relative to the largest; 0.0 = equal
    encoder_layers: int = 0  # of `sites`: those of the encoder of a text-to-text model
    heads: int = 0  # MoE layers of a head that drafts tokens, beside `sites`
    head_bytes: int = 0  # of `dense_bytes`: those of a head, with experts or without
    left_out: tuple[str, ...] = ()  # parts of a multimodal model that are not loaded

    @property
    def state_bytes(self) -> int:
        """Bytes of a sequence's states, whatever its length: those of a chat stay while others have the memory."""
        return sum(layer.state_bytes for layer in self.kv)

    def kv_bytes(self, context: int) -> int:
        """Bytes of KV cache and states of one sequence of `context` positions."""
        return sum(
            layer.state_bytes + layer.bytes_per_token * min(context, layer.window or context) for layer in self.kv
        )


def outline(meta: Any) -> Outline:
    """Measure a model from `meta_skeleton`. Raises ModelError when it is not a MoE model, or has
    unsupported behaviour."""
    sites = find_experts(meta)
    config = text_config(meta.config)
    kv, states, itemsize = _layers(meta, sites)
    head = head_of(meta)
    head_bytes = 0 if head is None else dense_bytes(meta, head.layer, filter(None, (head.site,)))
    return Outline(
        hidden=config.hidden_size,
        vocab=config.vocab_size,
        context_limit=context_limit(config),
        dense_bytes=dense_bytes(meta, meta, sites) + head_bytes,
        kv=kv if head is None else (*kv, KvLayer(head.kv_bytes, None)),
        sites=tuple(sites),
        states=states,
        weights_itemsize=itemsize,
        linears=linears(meta, sites),
        encoder_layers=encoder_layers(meta, sites),
        heads=0 if head is None or head.site is None else 1,
        head_bytes=head_bytes,
        left_out=keep_text(meta),
        closeness=max(getattr(site.module, CLOSE, 0.0) for site in sites),
    )


def context_limit(config: Any) -> int:
    """Most tokens of a prompt and its answer. Text-to-text models with relative positions state what they were trained
    with, if anything."""
    stated = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    return int(stated or RELATIVE)


def dense_bytes(meta: Any, module: nn.Module, sites: Iterable[ExpertsSite]) -> int:
    """Bytes of a module's parameters and buffers outside the experts: tied ones once, some in fp32 as transformers'
    loader keeps them."""
    experts = {id(one) for site in sites for one in site.module.parameters(recurse=False)}
    named = dict((*module.named_parameters(), *module.named_buffers()))
    wide = re.compile("|".join(p.replace("*", ".*") for p in meta._get_dtype_plan(meta.dtype)) or r"(?!)")
    return sum(
        t.numel() * (max(t.itemsize, 4) if wide.search(name) else t.itemsize)
        for name, t in named.items()
        if id(t) not in experts
    )


@torch.no_grad()
def _layers(meta: Any, sites: list[ExpertsSite]) -> tuple[tuple[KvLayer, ...], StateLayers, int]:
    """Run one token through the meta model with a cache for one position and measure its allocations: works for every
    kind of layer. Also checks that every router's output is understood, and that no layer is computed twice."""
    kind, sizes, visits = meta.config.model_type, [1], Counter[int]()

    def visit(site: ExpertsSite, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        visits[site.index] += 1
        return torch.zeros_like(hidden)

    try:
        cache = empty_cache(meta.config)
        own = reserve(cache, 1)
        with (
            _all_selected(),
            install(
                meta,
                sites,
                visit,
                lambda layer, args, kwargs, output: sizes.append(read_router(sites[layer], output).weights.itemsize),
            ),
        ):
            for _ in range(1 + meta.config.is_encoder_decoder):  # whose first pass is over a prompt alone
                cached_pass(meta, torch.zeros(1, 1, dtype=torch.long, device="meta"), cache)
            if len(cache.layers) > len(own) or max(visits.values(), default=1) > 1:
                raise ModelError("it computes some of its layers several times for each token")
            states = rehearse(meta, own)
    except Exception as error:  # the model's own code, run without weights
        log.info("the code of a %r does not run without weights: %s: %s", kind, type(error).__name__, error)
        raise ModelError(
            f"{kind!r} does not work the way Moestro needs: {_reason(error)}. Choose another model."
        ) from error
    return tuple(KvLayer(layer.growing_bytes, layer.window, layer.state_bytes) for layer in own), states, max(sizes)


def _all_selected() -> AbstractContextManager[object]:
    """Measure a model that selects positions by computed values as if it selected all of them."""
    if hasattr(fx, ALL):
        patched: AbstractContextManager[object] = fx.patch({ALL: True})
        return patched
    return nullcontext()


def _reason(error: Exception) -> str:
    """Why a model's own code fails when run without weights, as part of a sentence."""
    if isinstance(error, ModelError):
        return str(error)
    if isinstance(error, NotImplementedError) or "meta" in str(error):  # torch's message for a value without data
        return (
            "its code decides by the numbers that it computes, so what it takes cannot be known before its weights "
            "are read"
        )
    if not isinstance(error, ValueError):  # not worded for users
        return (
            "transformers' own code for it does not run on text alone, or the sizes in its config.json contradict "
            "each other"
        )
    first = re.sub(r"<class '(?:\w+\.)*(\w+)'>", r"\1", f"{str(error).strip()}\n".splitlines()[0]).rstrip(" .:")
    return f'transformers\' own code for it stops with "{first or "no reason given"}"'
