"""Models that write one text for another: an encoder reads the prompt in one pass, a decoder writes the answer.

`as_causal` gives such a model the form of a causal one, whose text is the prompt, the decoder's start token and the
answer: the pass over an empty KV cache is the encoder's, over the prompt; all later ones are the decoder's. The KV
cache has two layers for each of the decoder's: keys and values of the answer first, then those that cross-attention
made of the prompt.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from transformers import DynamicCache, EncoderDecoderCache
from transformers.cache_utils import DynamicLayer
from transformers.modeling_outputs import CausalLMOutputWithPast, MoEModelOutput

from core.hf.cached_pass import CACHE
from core.hf.discover import ExpertsSite
from core.types import ModelShape

SERVED = ("SwitchTransformersForConditionalGeneration",)
"""Classes of transformers whose forward is understood here, and whose experts have an adapter."""


def empty_cache(config: Any) -> DynamicCache:
    """An empty KV cache for a model of this config: all that is kept of a sequence."""
    if not config.is_encoder_decoder:
        return DynamicCache(config=config)
    return _over([DynamicLayer() for _ in range(2 * config.num_decoder_layers)])


def as_causal(model: Any) -> None:
    """Give a text-to-text model its new form; a causal one stays as it is."""
    if model.config.is_encoder_decoder:
        vars(model)["forward"] = partial(_forward, model)


def start_token(generation_config: Any) -> int:
    """What the decoder begins with, as transformers' `generate` has it."""
    for name in ("decoder_start_token_id", "bos_token_id", "pad_token_id"):
        if isinstance(token := getattr(generation_config, name, None), int):
            return token
    return 0


def encoder_layers(model: Any, sites: Sequence[ExpertsSite]) -> int:
    """How many of its MoE layers are the encoder's; they come first."""
    return sum(site.name.startswith("encoder.") for site in sites) if model.config.is_encoder_decoder else 0


def decoder_sites(model: Any, sites: Sequence[ExpertsSite]) -> Sequence[ExpertsSite]:
    """The MoE layers that compute an answer, counted from 0: of a causal model all."""
    own = sites[encoder_layers(model, sites) :]
    if len(own) == len(sites):
        return sites
    return [replace(site, index=at) for at, site in enumerate(own)]


def decoder_shape(shape: ModelShape) -> ModelShape:
    """The shape of those alone."""
    return replace(shape, layers=shape.layers - shape.encoder_layers, encoder_layers=0)


def divided(cache: DynamicCache) -> EncoderDecoderCache:
    """A cache of `empty_cache` as the decoder takes it; what is appended to one is appended to the other."""
    half = len(cache.layers) // 2
    return EncoderDecoderCache(_over(cache.layers[:half]), _over(cache.layers[half:]))


def has_read(cache: DynamicCache) -> bool:
    """Whether the cache holds a prompt."""
    return bool(cache.layers[-1].get_seq_length())


def keep_prompt(model: Any, states: torch.Tensor, cache: DynamicCache) -> None:
    """Append a prompt, as the encoder read it [1, T, H], to an empty cache: what cross-attention needs of it."""
    crossed = divided(cache).cross_attention_cache
    for at, attention in enumerate(cross_attentions(model)):
        crossed.update(*[in_heads(attention, part(states)) for part in (attention.k, attention.v)], at)


def cross_attentions(model: Any) -> Iterator[Any]:
    """The decoder's modules that attend to the prompt, in the order of its layers."""
    for block in model.decoder.block:
        yield block.layer[1].EncDecAttention


def in_heads(attention: Any, rows: torch.Tensor) -> torch.Tensor:
    """[1, t, heads * dim] -> [1, heads, t, dim]."""
    return rows.view(*rows.shape[:2], -1, attention.key_value_proj_dim).transpose(1, 2)


def no_logits(model: Any, rows: int) -> torch.Tensor:
    """[rows, V] of a pass over prompts, after which the start token comes: not numbers."""
    return torch.full((1, 1), torch.nan, device=model.device).expand(rows, model.config.vocab_size)


def _over(layers: list[Any]) -> DynamicCache:
    cache = DynamicCache()
    cache.layers = layers
    return cache


def _forward(
    model: Any, input_ids: torch.Tensor, logits_to_keep: int | torch.Tensor = 0, **kwargs: Any
) -> CausalLMOutputWithPast:
    """input_ids [1, T] of a prompt, or of the start token and the answer -> logits [1, n, V], for a prompt none.
    Without a cache the prompt and the start token are computed."""
    given = kwargs.get(CACHE)
    cache = empty_cache(model.config) if given is None else given
    if not has_read(cache):
        keep_prompt(model, model.encoder(input_ids=input_ids).last_hidden_state, cache)
        if given is not None:
            return _output(no_logits(model, 1)[None], cache)
        input_ids = input_ids.new_full((1, 1), start_token(model.generation_config))
    read = MoEModelOutput(input_ids.new_empty(1, 0, model.config.d_model, dtype=model.dtype))  # the cache has it
    logits = (
        type(model)
        .forward(model, encoder_outputs=read, decoder_input_ids=input_ids, use_cache=True, **{CACHE: divided(cache)})
        .logits
    )
    kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
    return _output(logits[:, kept], cache)


def _output(logits: torch.Tensor, cache: DynamicCache) -> CausalLMOutputWithPast:
    return CausalLMOutputWithPast(logits=logits, **{CACHE: cache})
