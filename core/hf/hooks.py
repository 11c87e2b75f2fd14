"""Installs our experts computation in a transformers model, and removes it completely.

Every experts module gets an instance `forward` that shadows its class's: the same call as transformers' experts
interface would make, without its overhead. The name registered with that interface is used to load a model without
experts. On a GPU norms (core.hf.fused_rmsnorm) get a `forward`, too, and so does attention, in which rotary embeddings
are then computed at once (core.hf.rotary). State is kept on the modules and in `Installed`; this module has none.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from core.errors import ModelError
from core.hf.discover import ExpertsSite, RouterOutput, read_router
from core.hf.expert_attributes import ASCENDING
from core.hf.fused_rmsnorm import fuse
from core.hf.own_forward import restore
from core.hf.rotary import replace

NAME = "moestro"  # of our experts implementation in transformers' registry
BOUND = "forward"  # attribute of an experts module that shadows its class's method while we compute it

ExpertsForward = Callable[[ExpertsSite, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(site, hidden [T,H], ids [T,k] int64, weights [T,k]) -> [T,H] in hidden's dtype."""
RouterObserver = Callable[[int, tuple[Any, ...], dict[str, Any], tuple[torch.Tensor, ...]], None]
"""(layer, args, kwargs, output) of a router's call, after it."""


def register() -> None:
    """Register the name with transformers; idempotent."""
    ALL_EXPERTS_FUNCTIONS.register(NAME, _unbound)


def _unbound(module: nn.Module, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    raise ModelError(
        "This model was loaded without its experts and nothing computes them yet. Load it through the engine."
    )


class Installed:
    """Our hooks in one model. `uninstall` restores everything and may be called twice; also a context manager."""

    def __init__(
        self,
        model: Any,
        sites: Sequence[ExpertsSite],
        experts_forward: ExpertsForward,
        router_observer: RouterObserver | None,
    ) -> None:
        self._model, self._sites = model, tuple(sites)
        self._before: dict[str, str | None] | None = model.get_experts_implementation()
        self._handles: list[RemovableHandle] = []
        model.set_experts_implementation(NAME)
        for site in self._sites:
            setattr(site.module, BOUND, _bind(site, experts_forward))
            if router_observer is not None:
                hook = _observe(site.index, router_observer)
                self._handles.append(site.router.register_forward_hook(hook, with_kwargs=True))
        self._quick = [*fuse(model), *replace(model)]

    def uninstall(self) -> None:
        """Remove the hooks and restore the model's former experts implementation."""
        if self._before is None:
            return
        for handle in self._handles:
            handle.remove()
        for site in self._sites:
            delattr(site.module, BOUND)
        restore(self._quick)
        self._model.set_experts_implementation(self._before)
        self._before = None

    def __enter__(self) -> Installed:
        return self

    def __exit__(self, *error: object) -> None:
        self.uninstall()


def install(
    model: Any,
    sites: Sequence[ExpertsSite],
    experts_forward: ExpertsForward,
    router_observer: RouterObserver | None = None,
) -> Installed:
    """Make `experts_forward` compute the experts of every site, and call `router_observer` for every router call.

    Raises ModelError, with the model unchanged, when it already has hooks of ours.
    """
    if any(BOUND in vars(site.module) for site in sites):
        raise ModelError("This model is already in use by another engine. Unload that one first.")
    register()
    return Installed(model, sites, experts_forward, router_observer)


def _bind(site: ExpertsSite, forward: ExpertsForward) -> Callable[..., torch.Tensor]:
    if not getattr(site.module, ASCENDING, False):
        return lambda hidden, ids, weights: forward(site, hidden, ids, weights)

    def ascending(hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        ids, order = ids.sort(-1)
        return forward(site, hidden, ids, weights.gather(-1, order))

    return ascending


def _observe(layer: int, observer: RouterObserver) -> Callable[..., None]:
    return lambda module, args, kwargs, output: observer(layer, args, kwargs, output)


@torch.no_grad()
def probe_router(site: ExpertsSite, args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Tensor:
    """What `site`'s router would select, given the arguments of another layer's router call.

    Returns [T, E] fp32, the softmax of its logits; where a router ranks by more than its logits (correction bias,
    expert groups), the experts it would select are raised just above the others, so that the top k of a row are always
    its selection. Fires no hooks. Arguments after the first that the site's block owns by name (the correction bias of
    minimax_m2) are taken from this site, not from the observed layer.
    """
    return preferences(call_router(site, args, kwargs))


@torch.no_grad()
def call_router(site: ExpertsSite, args: Sequence[Any], kwargs: Mapping[str, Any]) -> RouterOutput:
    """The output of `site`'s router for the arguments of another layer's, substituting arguments as
    in `probe_router`. Those that it needs beside the states are also taken from the site where none are given, as by a
    program that computed the other layer without its router's module."""
    needed = _needed(type(site.router).forward)
    if needed or len(args) + len(kwargs) > 1:
        kwargs = {**dict(zip(_parameters(type(site.router).forward), args, strict=False)), **kwargs}
        args = ()
        own = dict.fromkeys([*list(kwargs)[1:], *needed])
        kwargs |= {name: getattr(site.parent, name) for name in own if hasattr(site.parent, name)}
    return read_router(site, site.router.forward(*args, **kwargs))


def preferences(answer: RouterOutput) -> torch.Tensor:
    """[T, E] fp32: softmax of the logits, with the selected experts raised just above the others."""
    logits, _, ids = answer
    scores = logits.float().softmax(-1)
    best_of_others = scores.scatter(-1, ids, 0.0).amax(-1, keepdim=True)
    above = torch.nextafter(best_of_others, torch.full_like(best_of_others, 2.0))
    return scores.scatter_(-1, ids, torch.maximum(scores.gather(-1, ids), above))


@functools.cache
def _parameters(forward: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(forward).parameters)[1:]  # without self


@functools.cache
def _needed(forward: Callable[..., Any]) -> tuple[str, ...]:
    """Parameters after the first that have no default."""
    names, known = _parameters(forward)[1:], inspect.signature(forward).parameters
    variable = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    return tuple(
        name for name in names if known[name].default is known[name].empty and known[name].kind not in variable
    )
