"""Observes every router of a model: its input, its output, and the residual stream before its norm.

Nothing is copied or computed until a reader requests it. The tensors belong to the running pass: a callback that keeps
one must clone it and move it off the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from core.hf.discover import ExpertsSite, RouterOutput, read_router
from core.hf.hooks import call_router, preferences
from core.hf.norms import RouterContext, context_of, find_contexts, norm_of

__all__ = ["RouterContext", "Seen", "Watch", "answer", "ask", "context_of", "norm_of", "watch"]


class Seen:
    """One call of one router. T = batch * positions of the pass, in order.

    `residual` [T, H]: input of the norm that feeds the router; None where the router's input is not a norm's output.
    `args`, `kwargs`: the router's own call, for `ask`.
    """

    __slots__ = ("_output", "_probs", "_site", "args", "kwargs", "layer", "residual")

    def __init__(
        self,
        site: ExpertsSite,
        residual: torch.Tensor | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: tuple[torch.Tensor, ...],
    ) -> None:
        self.layer, self.residual, self.args, self.kwargs = site.index, residual, args, kwargs
        self._site, self._output = site, output
        self._probs: torch.Tensor | None = None

    @property
    def hidden(self) -> torch.Tensor:
        """[T, H] the router's input, in the model's dtype."""
        states: torch.Tensor = next(iter((*self.args, *self.kwargs.values())))
        return states.reshape(-1, states.shape[-1])

    @property
    def on_gpu(self) -> bool:
        """Whether its tensors are on a GPU."""
        return self._output[0].device.type == "cuda"

    @property
    def output(self) -> RouterOutput:
        """The router's output: logits [T, E], weights [T, k], ids [T, k]."""
        found = read_router(self._site, self._output)
        return RouterOutput(*(t.reshape(-1, t.shape[-1]) for t in found))

    @property
    def probs(self) -> torch.Tensor:
        """[T, E] fp32: softmax of the router's logits, computed at first access."""
        if self._probs is None:
            self._probs = self.output.logits.float().softmax(-1)
        return self._probs


class Watch:
    """The hooks of `watch`. `remove` uninstalls them and may be called twice; also a context manager."""

    def __init__(self, handles: list[RemovableHandle]) -> None:
        self._handles = handles

    def remove(self) -> None:
        while self._handles:
            self._handles.pop().remove()

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()


def watch(
    model: Any,
    sites: Sequence[ExpertsSite],
    on_router: Callable[[Seen], None],
    on_embedding: Callable[[torch.Tensor], None] | None = None,
    *,
    norms: bool = True,
) -> Watch:
    """Call `on_router` after every router, within the pass, before the layer's experts; `on_embedding` with [T, H], the
    embedding layer's output, before the first layer.

    The norms are found by `find_contexts`, which runs the model where it was not called for it before; with
    `norms=False` it is not called, and `residual` is None. Changes no result. Must not be called while a pass runs.
    """
    places = find_contexts(model, sites) if norms else [RouterContext(None, None)] * len(sites)
    residuals: dict[int, torch.Tensor] = {}
    handles: list[RemovableHandle] = []

    def normed(index: int, args: tuple[Any, ...]) -> None:
        residuals[index] = args[0]

    def routed(site: ExpertsSite, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        before = residuals.pop(site.index, None)
        on_router(Seen(site, None if before is None else before.reshape(-1, before.shape[-1]), args, kwargs, output))

    for site, place in zip(sites, places, strict=True):
        if place.norm is not None:
            handles.append(
                place.norm.register_forward_pre_hook(lambda module, args, index=site.index: normed(index, args))
            )
        handles.append(
            site.router.register_forward_hook(
                lambda module, args, kwargs, output, site=site: routed(site, args, kwargs, output), with_kwargs=True
            )
        )
    if on_embedding is not None:
        tell = on_embedding
        handles.append(
            model.get_input_embeddings().register_forward_hook(
                lambda module, args, output: tell(output.reshape(-1, output.shape[-1]))
            )
        )
    return Watch(handles)


def ask(site: ExpertsSite, hidden: torch.Tensor, seen: Seen) -> torch.Tensor:
    """[T, E] fp32: the preferences of `site`'s router for `hidden` [T, H] in place of the input in `seen`.

    As in `probe_router`, the top k of a row are always the router's selection, even where it ranks by more than its
    logits. Fires no hooks.
    """
    return preferences(answer(site, hidden, seen))


@torch.no_grad()
def answer(site: ExpertsSite, hidden: torch.Tensor, seen: Seen) -> RouterOutput:
    """The router's raw output for `hidden`: logits [T, E], weights [T, k] and ids [T, k]."""
    like: torch.Tensor = next(iter((*seen.args, *seen.kwargs.values())))
    states = hidden.to(like.dtype)
    states = (
        states.reshape(like.shape)
        if states.numel() == like.numel()
        else states.reshape(*(1,) * (like.dim() - 2), *states.shape)
    )
    if seen.args:
        router_output = call_router(site, (states, *seen.args[1:]), seen.kwargs)
    else:
        first, *_ = seen.kwargs
        router_output = call_router(site, (), {**seen.kwargs, first: states})
    return RouterOutput(*(t.reshape(-1, t.shape[-1]) for t in router_output))
