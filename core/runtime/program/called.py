"""The experts of a layer in a pass of the program, with the hooks around them called as in a pass of transformers."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from core.hf.discover import ExpertsSite
from core.runtime.program.bind import Layer
from core.runtime.program.feed_forward import Routed

Experts = Callable[[ExpertsSite, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def called(
    layer: Layer,
    rest: Routed,
    dtype: torch.dtype,
    states: tuple[torch.Tensor, torch.Tensor],
    routed: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    experts: Experts,
) -> torch.Tensor:
    """What the experts of a layer add to the residual stream. `states`: that stream and what of it experts get, both
    [T, H] fp32; `routed`: the router's logits [T, E], ids and weights [T, k]; `dtype`: of the model's states, as hooks
    see them."""
    (x, normed), (logits, ids, weights) = states, routed
    site, after = rest.site, layer.after_module
    if after is not None and after._forward_pre_hooks:
        _before(after, (x.to(dtype),))
    if site.router._forward_hooks or site.router._forward_pre_hooks:
        beside = rest.beside is not None  # of its own norm, which returns the shares of all experts
        seen = (x if beside else normed).to(dtype)
        seen = seen[None] if rest.batched else seen
        scores = logits.softmax(-1) if beside else logits
        _before(site.router, (seen,))
        _after(site.router, (seen,), (scores.to(dtype), weights.to(dtype), ids))
    given = normed, ids, weights
    if site.module._forward_pre_hooks:
        _before(site.module, given)
    output = experts(site, *given)
    if site.module._forward_hooks:
        _after(site.module, given, output)
    return output


def _before(module: nn.Module, args: tuple[Any, ...]) -> None:
    """Call a module's hooks before it."""
    for name, hook in [*module._forward_pre_hooks.items()]:
        hook(module, args, {}) if name in module._forward_pre_hooks_with_kwargs else hook(module, args)


def _after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """Call a module's hooks after it."""
    for name, hook in [*module._forward_hooks.items()]:
        hook(module, args, {}, output) if name in module._forward_hooks_with_kwargs else hook(module, args, output)
