"""Heads that predict further tokens (MTP), which transformers' models leave out: a decoder layer after the last one,
with two norms and a projection before it and a norm after it. Embeddings, rotary angles and the output layer are the
model's own, which some checkpoints have a second time.

Of the kinds that there are three are known. DeepSeek-V3's (arXiv 2412.19437, section 2.2), which GLM-4.x has, too, is
stored as a layer more. Qwen3-Next's and Qwen3.5's computes the same, with full attention, under names of its own. Of
MiMo-V2-Flash's three (arXiv 2601.02780) the first one is used; they see a window, and have a dense layer in place of
experts. The layer itself is transformers' own class, so that its arithmetic is that of all others; `attach` makes it
part of a model, under the names that the first kind has in checkpoints, while weights are read.
"""

import copy
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from core.errors import ModelError
from core.hf.cache import reserve
from core.hf.cached_pass import CACHE
from core.hf.discover import ExpertsSite, find_experts
from core.hf.expert_attributes import CLOSE, CONVERSIONS
from core.hf.hooks import BOUND
from core.hf.reserved_layers import ReservedLayer
from core.hf.reserved_tensor import Allocated
from core.hf.text_to_text import empty_cache
from core.system.wording import reason

HEAD: Final = "_moestro_head"  # on a model: its `MtpHead`, which is not one of its modules
PARTS = "enorm", "hnorm", "eh_proj", "shared_head.norm"
QWEN = "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"  # the same ones after `STORED` in Qwen's checkpoints
STORED: Final = "mtp."
MIMO: Final = "model.mtp.layers.0."  # before the names of a layer in MiMo's checkpoints, but for these:
OWN = {"final_layernorm": "shared_head.norm", "pre_mlp_layernorm": "post_attention_layernorm"}
WINDOWED = "mimo_v2_flash"  # the models of such heads
FULL, WINDOW = "full_attention", "sliding_attention"
UNKNOWN = "heads of this kind are not known"


def objection(config: Any, names: Collection[str]) -> str | None:
    """Why the head of a checkpoint with tensors of these names is not loaded; "" if it is, None where it has none.
    `config` is that of the text model."""
    parts: tuple[str, ...]
    layer, parts = layer_of_head(config), PARTS
    if f"{STORED}fc.weight" in names:
        layer, parts = STORED, QWEN
    elif f"{MIMO}eh_proj.weight" in names:
        layer, parts = MIMO, ("enorm", "hnorm", "eh_proj", *OWN)
    elif f"{layer}eh_proj.weight" not in names:
        return None
    missing = [part for part in parts if f"{layer}{part}.weight" not in names]
    return f"{UNKNOWN}: {missing[0]} is not among its weights" if missing else ""


def layer_of_head(config: Any) -> str:
    """What the names of a head's modules begin with, in a model with this config."""
    return f"model.layers.{getattr(config, 'num_hidden_layers', 0)}."


def may_have_head(names: Collection[str]) -> bool:
    """Whether a look at a checkpoint's config may be worth it: `objection` tells."""
    return any(name.endswith((".eh_proj.weight", f"{STORED}fc.weight")) for name in names)


def stored_names(config: Any) -> dict[str, str]:
    """What Qwen's and MiMo's checkpoints call a head's weights, as patterns -> what they are called once attached."""
    layer = layer_of_head(config)
    parts = {f"{STORED}{own}.": f"{layer}{part}." for own, part in zip(QWEN, PARTS, strict=True)}
    parts |= {f"{MIMO}{own}.": f"{layer}{part}." for own, part in OWN.items()}
    return {f"^{re.escape(own)}": part for own, part in (parts | {f"{STORED}layers.0.": layer, MIMO: layer}).items()}


def _windowed(config: Any) -> bool:
    return getattr(config, "model_type", "") == WINDOWED


def has_attached(model: Any) -> bool:
    """Whether a head is among a model's modules."""
    layers = getattr(getattr(model, "model", None), "layers", None)
    return isinstance(layers, nn.ModuleList) and len(layers) > 0 and hasattr(layers[-1], "eh_proj")


def attach(model: Any) -> None:
    """Add a head to a model, as the layer after its last one, which its forward does not compute. Raises ModelError
    where the model is built in a way that is not known, and changes nothing then. On the meta device it is tried."""
    config = model.config
    inner: Any = getattr(model, "model", None)
    layers: Any = getattr(inner, "layers", None)
    known = isinstance(layers, nn.ModuleList) and all(hasattr(inner, name) for name in ("norm", "rotary_emb"))
    if not known or not hasattr(model, "lm_head") or len(layers) != config.num_hidden_layers:
        raise ModelError(f"{UNKNOWN}: the model is not built like those that have them")
    kept = DynamicLayer, DynamicSlidingWindowLayer if _windowed(config) else LinearAttentionLayer
    if any(type(one) not in kept for one in empty_cache(config).layers):
        raise ModelError(f"{UNKNOWN}: the model keeps other things of a text than keys, values and states")
    if any(hasattr(site.module, one) for site in find_experts(model)[:1] for one in (CONVERSIONS, CLOSE)):
        raise ModelError(f"{UNKNOWN}: transformers' experts interface does not serve its layers")
    try:
        with torch.device(model.device):
            layers.append(_layer(layers[-1], inner.norm, config).to(model.dtype).eval())
    except (IndexError, TypeError, ValueError, AttributeError, KeyError) as error:
        raise ModelError(f"{UNKNOWN}: a layer more cannot be built ({reason(error)})") from error
    try:
        site = _site(model)
        if site is None and not _windowed(config):
            raise ModelError(f"{UNKNOWN}: it has no experts")
        if model.device.type == "meta":
            _try(MtpHead(site, layers[-1], model))
    except ModelError:
        del layers[-1]
        raise


def _site(model: Any) -> ExpertsSite | None:
    """The experts of the head that was attached to a model."""
    site = find_experts(model)[-1]
    return site if site.name.startswith(f"model.layers.{len(model.model.layers) - 1}.") else None


def _try(head: "MtpHead") -> None:
    try:
        head.logits(torch.empty(1, head.config.hidden_size, device="meta"))
        assert head.kv_bytes
    except Exception as error:  # the model's own code, called as transformers does not call it
        raise ModelError(f"{UNKNOWN}: the layer does not run alone ({reason(error)})") from error


def _layer(like: nn.Module, norm: nn.Module, config: Any) -> Any:
    """A decoder layer with the parts of a head, under the checkpoint's names."""
    hidden, number = config.hidden_size, config.num_hidden_layers
    more = _with_layers(config, number + 1)
    if _windowed(config):
        more.layer_types = [*config.layer_types, WINDOW]
        more.mlp_layer_types = [*config.mlp_layer_types, "dense"]
    layer: Any = type(like)(more, number)
    for module in layer.modules():
        if getattr(module, "config", None) is more:
            module.config = config
    layer.self_attn.layer_idx = 0  # in a KV cache of its own
    layer.enorm, layer.hnorm = (type(norm)(hidden, eps=config.rms_norm_eps) for _ in range(2))
    layer.eh_proj = nn.Linear(2 * hidden, hidden, bias=False)
    layer.shared_head = nn.Module()
    layer.shared_head.norm = type(norm)(hidden, eps=config.rms_norm_eps)
    return layer


def _with_layers(config: Any, count: int) -> Any:
    """The config of a model of so many layers, of which the last one has full attention."""
    made = copy.copy(config)
    made.num_hidden_layers = count
    if (kinds := getattr(config, "layer_types", None)) is not None:
        made.layer_types = [*kinds[: count - 1], FULL]
    return made


def remove(model: Any) -> None:
    """Take away the head that was attached to a model."""
    del model.model.layers[-1]


def detach(model: Any) -> None:
    """Take the head that was attached to a model out of its modules: `head_of` has it from now on."""
    site, layers = _site(model), model.model.layers
    layer = layers[-1]
    del layers[-1]
    vars(model)[HEAD] = MtpHead(site, layer, model)


def head_of(model: Any) -> "MtpHead | None":
    """The head that a model was loaded with."""
    found: MtpHead | None = vars(model).get(HEAD)
    return found


@contextmanager
def attached(model: Any) -> Iterator[None]:
    """Inside, a model's head is among its modules, under the checkpoint's names, if it has one."""
    head = head_of(model)
    if head is not None:
        model.model.layers.append(head.layer)
    try:
        yield
    finally:
        if head is not None:
            del model.model.layers[-1]


@dataclass(frozen=True, eq=False, slots=True)
class MtpHead:
    """Guesses, from a model's last hidden state and the token that was drawn from it, the token after that. `site`: its
    experts, one more MoE layer after the model's own; None = it has a dense layer in their place."""

    site: ExpertsSite | None
    layer: Any  # the modules that are its own
    model: Any  # whose modules it uses as they are when it computes: some may be replaced once it is loaded

    @property
    def config(self) -> Any:
        """The model's."""
        return self.model.config

    @property
    def own_config(self) -> Any:
        """That of a model of its layer alone."""
        return _with_layers(self.config, 1)

    @property
    def window(self) -> tuple[int, str]:
        """A token's attention reads the keys of the last so many, with its own, and its angles are of this kind; 0 = of
        all, and there is one kind."""
        return (self.config.sliding_window, WINDOW) if _windowed(self.config) else (0, "")

    @property
    def inner(self) -> Any:
        """The model without its output layer."""
        return self.model.model

    def cache(self, context: int, allocated: Allocated) -> "HeadCache":
        """Memory for the keys and values of one text of up to so many positions."""
        cache = DynamicCache()
        cache.layers = [DynamicLayer()]
        (own,) = reserve(cache, context, allocated)
        assert isinstance(own, ReservedLayer)
        return HeadCache(cache, own)

    @torch.inference_mode()
    def normed(self, states: torch.Tensor) -> torch.Tensor:
        """A model's last states [T, H], as its output layer gets them, and heads of both kinds in vLLM and SGLang."""
        found: torch.Tensor = self.inner.norm(states.to(self.layer.eh_proj.weight.dtype))
        return found

    @torch.inference_mode()
    def joined(self, hidden: torch.Tensor, tokens: Sequence[int]) -> torch.Tensor:
        """[T, H] what its layer gets of normed states `hidden` [T, H] and the token after each."""
        layer = self.layer
        embedded = self.inner.embed_tokens(torch.tensor(tokens, device=layer.eh_proj.weight.device))
        both = layer.enorm(embedded), layer.hnorm(hidden.to(embedded.dtype))
        found: torch.Tensor = layer.eh_proj(torch.cat(both, -1))
        return found

    @torch.inference_mode()
    def states(self, hidden: torch.Tensor, tokens: Sequence[int], first: int, cache: "HeadCache") -> torch.Tensor:
        """[T, H], normed, of the normed states `hidden` [T, H] at the positions from `first` on, and the token after
        each. `cache` holds what came before, and then them. These states, and the token that is guessed from the last
        one, are what a further guess is made from (arXiv 2412.19437, section 2.2, one module for every depth)."""
        layer, x = self.layer, self.joined(hidden, tokens)[None]
        device = x.device
        positions = torch.arange(first, first + len(tokens), device=device)[None]
        window, kind = self.window
        masked = create_sliding_window_causal_mask if window else create_causal_mask
        x = layer(
            x,
            attention_mask=masked(config=self.config, inputs_embeds=x, attention_mask=None, **{CACHE: cache.cache}),
            position_ids=positions,
            position_embeddings=self.inner.rotary_emb(x, positions, *[kind] * bool(kind)),
            use_cache=True,
            **{CACHE: cache.cache},
        )
        x = x[0] if isinstance(x, tuple) else x
        normed: torch.Tensor = layer.shared_head.norm(x)
        return normed[0]

    @torch.inference_mode()
    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """[V] of the token that is guessed from the last of the states [T, H]."""
        found: torch.Tensor = self.model.lm_head(states[-1:])
        return found[0]

    @property
    def kv_bytes(self) -> int:
        """Of its keys and values of a position, of a head on the meta device."""
        allocated = Allocated()
        cache, modules = self.cache(1, allocated), [one.module for one in (self.site,) if one is not None]
        for module in modules:
            setattr(module, BOUND, lambda hidden, ids, weights: torch.zeros_like(hidden))
        try:
            self.states(torch.empty(1, self.config.hidden_size, device="meta"), [0], 0, cache)
        finally:
            for module in modules:
                delattr(module, BOUND)
        return allocated.bytes


@dataclass(frozen=True, slots=True)
class HeadCache:
    """Keys and values of one text: those of its positions from somewhere on, without a gap."""

    cache: DynamicCache
    layer: ReservedLayer

    def cut(self, length: int) -> None:
        """Keep those of the first so many positions that it has."""
        self.layer.cut(length) if length else self.layer.clear()
