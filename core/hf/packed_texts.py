"""Several sequences in one pass of a text-to-text model, with nothing padded: see `core.hf.packed`.

Attention is computed one sequence after the other, over that one's own prompt and answer, all else over all rows.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache

from core.hf.adapters.switch import SHARES
from core.hf.packed import EAGER, Packing
from core.hf.text_to_text import divided, has_read, in_heads, keep_prompt, no_logits
from core.memory.to_device import to_device

ATTENTION = "SwitchTransformersAttention"
Held = tuple[torch.Tensor, torch.Tensor]
"""Keys and values [1, heads, t, dim]."""


@dataclass(slots=True)
class _Through:
    """A pass of some rows through the encoder or the decoder: so many of each sequence. `caches`: of the decoder."""

    counts: list[int]
    caches: list[Any] = field(default_factory=list)
    biases: list[torch.Tensor] = field(default_factory=list)  # by position, which the first layer computes for all


class TextPacking:
    """Passes of one text-to-text model over several sequences, one pass at a time. What a pass changes in the model is
    put back when it ends."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._attention = [one for one in model.modules() if type(one).__name__ == ATTENTION]
        self._routers = [one.router for one in model.modules() if hasattr(one, "router")]

    def compute(
        self,
        tokens: Sequence[Sequence[int]],
        lengths: Sequence[int],
        caches: Sequence[DynamicCache],
        device: torch.device,
        keep: int,
    ) -> torch.Tensor:
        """The prompts of sequences that begin, or the next `tokens` [t] of others' answers -> logits [keep, V] of the
        last rows of each, one sequence after the other; of prompts none."""
        counts = [len(some) for some in tokens]
        ids = to_device([[token for some in tokens for token in some]], device)
        begins = {not has_read(cache) for cache in caches}
        assert len(begins) == 1, "the encoder and the decoder compute passes of their own"
        if begins == {True}:
            for cache, states in zip(caches, self._run(self._model.encoder, ids, _Through(counts)), strict=True):
                keep_prompt(self._model, states, cache)
            return no_logits(self._model, keep * len(counts))
        through = _Through(counts, [divided(cache) for cache in caches])
        rows = torch.cat([states[0, -keep:] for states in self._run(self._model.decoder, ids, through)])
        if self._model.config.tie_word_embeddings:
            rows = rows * self._model.model_dim**-0.5
        logits: torch.Tensor = self._model.lm_head(rows)
        return logits

    def _run(self, stack: Any, ids: torch.Tensor, through: _Through) -> Sequence[torch.Tensor]:
        """The encoder or the decoder over rows of ids [1, T] -> each sequence's states [1, t, H]."""
        with self._packed(through):
            states = stack.embed_tokens(ids)
            for block in stack.block:
                states, *_ = block(states, encoder_hidden_states=states if through.caches else None)
            shares: Sequence[torch.Tensor] = stack.final_layer_norm(states).split(through.counts, 1)
            return shares

    @contextmanager
    def _packed(self, through: _Through) -> Iterator[None]:
        """Inside, attention and the experts' limits keep sequences apart."""
        try:
            for module in self._attention:
                vars(module)["forward"] = partial(_attend, module, through)
            for router in self._routers:
                setattr(router, SHARES, through.counts)
            yield
        finally:
            for module in self._attention:
                vars(module).pop("forward", None)
            for router in self._routers:
                vars(router).pop(SHARES, None)


AnyPacking = Packing | TextPacking


def packing_of(model: Any, experts: Sequence[nn.Module]) -> AnyPacking:
    """How passes over several sequences of a model are made. `experts`: its experts modules."""
    return TextPacking(model) if model.config.is_encoder_decoder else Packing(model, experts)


def _attend(
    module: Any,
    through: _Through,
    hidden_states: torch.Tensor,
    key_value_states: torch.Tensor | None = None,
    **given: Any,
) -> tuple[torch.Tensor, None, None]:
    """Takes the place of an attention module's forward."""
    crosses = key_value_states is not None
    queries = in_heads(module, module.q(hidden_states)).split(through.counts, 2)
    known = list(_prompts(module, through) if crosses else _own(module, hidden_states, through))
    if module.has_relative_attention_bias:
        through.biases = [_bias(module, own, keys) for own, (keys, _) in zip(queries, known, strict=True)]
    attend = getattr(sys.modules[type(module).__module__], EAGER)
    outs = []
    for at, (own, (keys, values)) in enumerate(zip(queries, known, strict=True)):
        mask, bias = (None, None) if crosses else (_mask(module, own, keys), through.biases[at])
        outs.append(attend(module, own, keys, values, mask, scaling=module.scaling, position_bias=bias)[0])
    return module.o(torch.cat(outs, 1).flatten(2)), None, None


def _own(module: Any, hidden: torch.Tensor, through: _Through) -> Iterator[Held]:
    """Of each sequence so far: of its prompt in the encoder, of its answer in the decoder."""
    keys, values = (in_heads(module, part(hidden)).split(through.counts, 2) for part in (module.k, module.v))
    if not through.caches:
        yield from zip(keys, values, strict=True)
    for cache, key, value in zip(through.caches, keys, values, strict=False):
        yield cache.self_attention_cache.update(key, value, module.layer_idx)


def _prompts(module: Any, through: _Through) -> Iterator[Held]:
    """What the cache of each sequence has of its prompt."""
    for cache in through.caches:
        layer = cache.cross_attention_cache.layers[module.layer_idx]
        yield layer.keys, layer.values


def _bias(module: Any, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    new, held = queries.shape[2], keys.shape[2]
    bias: torch.Tensor = module.compute_bias(new, held, device=queries.device, past_seen_tokens=held - new)
    return bias


def _mask(module: Any, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor | None:
    """What hides later tokens of an answer; None where there are none."""
    new, held = queries.shape[2], keys.shape[2]
    if not module.is_decoder or new == 1:
        return None
    hidden = torch.full((new, held), torch.finfo(queries.dtype).min, dtype=queries.dtype, device=queries.device)
    return hidden.triu(1 + held - new)
