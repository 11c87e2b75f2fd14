"""Recognises a model's decoder layers by their structure, and binds their weights: what the program computes with.

A form is a guess until `Program` has compared its results with those of the model's own modules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from core.errors import ModelError
from core.hf.discover import ExpertsSite, read_router
from core.hf.quantized_linear import WEIGHT, QuantizedLinear
from core.memory.codec.base import Base
from core.memory.codec.fast.products import CanonicalProducts, serves
from core.memory.codec.fast.steps import named, single
from core.memory.codec.matrix import Matrix, Part, matrix
from core.runtime.program import route
from core.runtime.program.attend import Attend
from core.runtime.program.rms import Norm
from core.runtime.program.rotate import Rotate
from core.runtime.program.route import Route

FP32 = torch.float32
MOST_IDS = 0.8  # of the experts of random states that a rule has to choose in the router's own order
CLOSE = 0.02  # of a router's weights: its logits are of 16 bits
ROTATIONS = ("default", "linear", "llama3", "yarn")  # whose angles do not depend on the length of a text


@dataclass(frozen=True, slots=True)
class Weight:
    """A dense matrix in memory that does not move."""

    products: CanonicalProducts
    slot: int
    owner: object

    @property
    def outputs(self) -> int:
        return self.products.matrix.outputs


@dataclass(frozen=True, slots=True)
class NormWeight:
    """A norm, and where its weights are."""

    form: Norm
    at: int
    owner: object


@dataclass(frozen=True, slots=True)
class Attention:
    """Grouped-query attention with rotary embeddings."""

    q: Weight
    k: Weight
    v: Weight
    o: Weight
    query_heads: int
    heads: int
    width: int
    scale: float
    q_norm: NormWeight | None
    k_norm: NormWeight | None
    bias: torch.Tensor | None

    @property
    def outputs(self) -> int:
        """Numbers of the product of queries, keys and values."""
        return (self.query_heads + 2 * self.heads) * self.width

    def kernels(self, cache: torch.dtype, rotated: int) -> tuple[Rotate, Attend]:
        """The kernels before and after keys and values are in the cache."""
        bias = self.bias.dtype if self.bias is not None else None
        norm = self.q_norm.form if self.q_norm is not None else None
        turned = Rotate(self.query_heads, self.heads, self.width, rotated, cache, norm, bias)
        return turned, Attend(self.query_heads, self.heads, self.width, self.width, cache, self.scale)


@dataclass(frozen=True, slots=True)
class Layer:
    """A decoder layer. `site` is None where a dense feed-forward layer stands in place of experts."""

    before: NormWeight
    attention: Attention
    after: NormWeight
    router: Weight
    route: Route
    site: ExpertsSite
    after_module: nn.Module  # the norm before the router, whose hooks get the residual stream


@dataclass(frozen=True, slots=True)
class Form:
    """A whole model. cos and sin [context, rotated / 2], fp32."""

    embedding: nn.Module
    layers: tuple[Layer, ...]
    norm: NormWeight
    head: Weight
    hidden: int
    cos: torch.Tensor
    sin: torch.Tensor
    dtype: torch.dtype


def bind(model: Any, sites: Sequence[ExpertsSite], context: int) -> Form:
    """The form of a model for texts of up to `context` tokens. Raises ModelError, with what is not known."""
    _known(model, ("model", "lm_head"))
    inner: Any = model.model
    _known(inner, ("embed_tokens", "layers", "norm", "rotary_emb"))
    layers, by_parent = inner.layers, {id(site.parent): site for site in sites}
    if len(layers) != len(sites):
        raise ModelError("not every layer has experts")
    cos, sin = _angles(inner.rotary_emb, context)
    embedding, dtype = inner.embed_tokens, model.dtype
    if type(embedding) is not nn.Embedding:
        raise ModelError(f"embeddings of the kind {type(embedding).__name__} are not known")
    found = tuple(_layer(layer, by_parent, cos.shape[-1] * 2) for layer in layers)
    hidden = embedding.weight.shape[1]
    return Form(embedding, found, _norm(inner.norm), _weight(model.lm_head), hidden, cos, sin, dtype)


def _known(module: nn.Module, names: tuple[str, ...]) -> None:
    """Raises ModelError where a module has other parts than these."""
    others = [name for name, _ in module.named_children() if name not in names]
    others += [name for name, _ in module.named_parameters(recurse=False)]
    if others or not all(hasattr(module, name) for name in names):
        raise ModelError(
            f"{type(module).__name__} is built in another way ({', '.join(others) or 'parts are missing'})"
        )


def _layer(layer: Any, sites: dict[int, ExpertsSite], rotated: int) -> Layer:
    _known(layer, ("self_attn", "mlp", "input_layernorm", "post_attention_layernorm"))
    site = sites.get(id(layer.mlp))
    if site is None:
        raise ModelError("a layer has no experts")
    _known(layer.mlp, ("experts", next(name for name, one in layer.mlp.named_children() if one is site.router)))
    router, rule = _router(site)
    return Layer(
        _norm(layer.input_layernorm),
        _attention(layer.self_attn, rotated),
        _norm(layer.post_attention_layernorm),
        router,
        rule,
        site,
        layer.post_attention_layernorm,
    )


def _attention(module: Any, rotated: int) -> Attention:
    normed = isinstance(getattr(module, "q_norm", None), nn.Module)
    names = ("q_proj", "k_proj", "v_proj", "o_proj", *(("q_norm", "k_norm") if normed else ()))
    _known(module, names)
    width = module.head_dim
    if getattr(module, "sliding_window", None) is not None or getattr(module, "softcap", None):
        raise ModelError("attention with windows or caps is not known")
    q, k, v, o = (_weight(getattr(module, name), biased=name != "o_proj") for name in names[:4])
    if rotated > width or q.outputs % width or k.outputs % width:
        raise ModelError("heads of this form are not known")
    bias = [getattr(module, name).bias for name in names[:3]]
    return Attention(
        q,
        k,
        v,
        o,
        q.outputs // width,
        k.outputs // width,
        width,
        float(module.scaling),
        _norm(module.q_norm, width) if normed else None,
        _norm(module.k_norm, width) if normed else None,
        torch.cat([one.detach() for one in bias]) if bias[0] is not None else None,
    )


def _norm(module: Any, width: int = 0) -> NormWeight:
    """An RMSNorm: found by what it does to a row."""
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not isinstance(weight, torch.Tensor) or weight.dim() != 1 or not isinstance(eps, float):
        raise ModelError(f"norms of the kind {type(module).__name__} are not known")
    if width and len(weight) != width:
        raise ModelError("norms across heads are not known")
    x = torch.randn(2, len(weight), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        got = type(module).forward(module, x.to(weight.dtype)).float()
    plain = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    for offset in (False, True):
        wanted = plain * (weight.detach().float() + offset)
        if (got - wanted).norm() < CLOSE * wanted.norm():
            return NormWeight(Norm(len(weight), eps, weight.dtype, offset), weight.data_ptr(), weight)
    raise ModelError(f"norms of the kind {type(module).__name__} are not known")


def _weight(module: Any, *, biased: bool = False) -> Weight:
    """A dense layer; a bias is someone else's to add."""
    if getattr(module, "bias", None) is not None and not biased:
        raise ModelError("dense layers with a bias are not known here")
    if type(module) is QuantizedLinear:
        assert isinstance(module.codec, Base)
        found = matrix(module.codec, WEIGHT)
        return _served(found, module.address, module)
    if type(module) is nn.Linear:
        return _plain(module.weight, module)
    raise ModelError(f"dense layers of the kind {type(module).__name__} are not known")


def _plain(weight: torch.Tensor, owner: object) -> Weight:
    if weight.dim() != 2 or not weight.is_contiguous() or weight.device.type != "cpu":
        raise ModelError("a weight is not where the program can read it")
    outputs, inputs = weight.shape
    part = Part(0, weight.dtype)
    found = Matrix(outputs, inputs, False, 0, 0, "", part, None, None, None, None)
    return _served(found, weight.data_ptr(), owner)


def _served(found: Matrix, slot: int, owner: object) -> Weight:
    if not serves(found):
        raise ModelError("this CPU has no kernels for a dense layer of the model")
    return Weight(CanonicalProducts(found, FP32), slot, owner)


@torch.inference_mode()
def _router(site: ExpertsSite) -> tuple[Weight, Route]:
    """A router with one matrix, and its rule, which is found by trying."""
    weights = dict(site.router.named_parameters())
    if set(weights) != {"weight"} or [*site.router.buffers()]:
        raise ModelError(f"routers of the kind {type(site.router).__name__} are not known")
    weight = weights["weight"]
    x = torch.randn(16, weight.shape[1], generator=torch.Generator().manual_seed(0)).to(weight.dtype)
    logits, wanted, chosen = read_router(site, type(site.router).forward(site.router, x))
    if (logits.float() - x.float() @ weight.float().t()).norm() > CLOSE * logits.float().norm():
        raise ModelError("the router does more than one product")
    given = logits.float().contiguous()
    first = Route(site.num_experts, site.top_k)
    for rule in (first, replace(first, renormalised=True), replace(first, score="softmax_chosen")):
        ids, found = torch.empty(len(x), site.top_k, dtype=torch.int64), torch.empty(len(x), site.top_k)
        at = {"logits": given.data_ptr(), "ids": ids.data_ptr(), "weights": found.data_ptr()}
        single(route.kernel(rule), named(route.FIELDS, **at), len(x))
        same = (ids == chosen).float().mean() > MOST_IDS  # equal logits come in another order
        if same and torch.allclose(found, wanted.float(), rtol=CLOSE, atol=1e-4):
            return _plain(weight, site.router), rule
    raise ModelError("the router weighs experts by a rule that is not known")


@torch.inference_mode()
def _angles(module: Any, context: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of every position, [context, rotated / 2] in fp32."""
    if getattr(module, "rope_type", None) not in ROTATIONS:
        raise ModelError("rotary embeddings whose angles depend on the text's length are not known")
    found = module(torch.empty(1, dtype=FP32), torch.arange(context)[None])
    half = found[0].shape[-1] // 2
    if any(not torch.equal(one[..., :half], one[..., half:]) for one in found):
        raise ModelError("rotary embeddings of another order are not known")
    cos, sin = (one[0, :, :half].contiguous() for one in found)
    return cos, sin
