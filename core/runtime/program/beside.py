"""Experts beside a dense layer: their router has a norm of its own, and a factor for each expert, as in Gemma 4."""

from dataclasses import replace
from typing import Any

import torch

from core.errors import ModelError
from core.hf.discover import ExpertsSite, read_router
from core.memory.codec.fast.steps import named, single
from core.runtime.program import route
from core.runtime.program.feed_forward import SAME, Beside, Routed, dense_of
from core.runtime.program.mixer import norm
from core.runtime.program.route import Route
from core.runtime.program.weights import CLOSE, FP32, TRIED, NormWeight, drawn, forward, known, norm_of, plain_weight

NORMS = "pre_feedforward_layernorm_2", "post_feedforward_layernorm_2", "post_feedforward_layernorm_1"
PARTS = "mlp", "router", "experts", *NORMS


@torch.inference_mode()
def beside_of(site: ExpertsSite, layer: Any, dtype: torch.dtype) -> Routed:
    """The feed-forward part of a decoder layer that has experts beside its `mlp`."""
    router: Any = site.router
    known(router, ("norm", "proj", "scale", "per_expert_scale"))
    plain = norm_of(router.norm, router.scale.numel())
    weights = router.scale.detach().float() * router.scalar_root_size
    before = NormWeight(replace(plain.form, weight=FP32), weights.data_ptr(), weights)
    product = plain_weight(router.proj.weight, router.proj, None)
    rule = Route(site.num_experts, site.top_k, renormalised=True, scales=True)
    experts, after_experts, after_dense = (norm_of(getattr(layer, name)) for name in NORMS)
    scales = router.per_expert_scale.detach().float().contiguous()
    norms = Beside(before, experts, after_experts, after_dense, scales)
    found = Routed(site, product, rule, None, dense_of(layer.mlp, dtype), None, beside=norms)
    _try(found, drawn(dtype, TRIED, product.inputs))
    return found


def _try(form: Routed, x: torch.Tensor) -> None:
    """Raises ModelError where the router chooses or weighs in another way."""
    beside, rule = form.beside, form.route
    assert beside is not None
    seen = read_router(form.site, forward(form.site.router, x))
    states, rows = torch.empty(x.shape), x.float().contiguous()
    step = norm(beside.router, rows, None, states)
    single(step.kernel, step.arguments, len(x))
    weight: Any = form.site.router
    logits = (states.to(x.dtype) @ weight.proj.weight.t()).float().contiguous()
    ids, weights = torch.empty(len(x), rule.chosen, dtype=torch.int64), torch.empty(len(x), rule.chosen)
    at = {"logits": logits, "ids": ids, "weights": weights, "scales": beside.scales}
    single(route.kernel(rule), named(route.FIELDS, **at), len(x))
    same = (ids == seen.ids).all(-1)
    if same.float().mean() < SAME or not torch.allclose(weights[same], seen.weights[same].float(), CLOSE, 1e-4):
        raise ModelError(f"{type(form.site.router).__name__} weighs experts by a rule that is not known")
