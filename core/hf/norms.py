"""Finds the norm before each router by running the model once without its experts, independent of module names.

The norm is the module of the model's width whose output is the router's input. The same run finds the factor with which
a layer adds its experts' output to the residual stream: each layer runs twice, with noise in place of experts.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from core.hf.discover import ExpertsSite
from core.system.wording import reason

log = logging.getLogger("moestro.hf")

CONTEXT = "_moestro_router_context"  # on a router: its `RouterContext`
TOKENS = (1, 2, 3)  # token ids of the run; not 0, which is often padding with a zero state
LOUD = 16.0  # noise relative to a router's input: must be visible in a large residual stream


class RouterContext(NamedTuple):
    """Surroundings of a router. `scale`: factor by which the layer adds its experts' output to the residual stream (1,
    or granite's residual_multiplier); None where it does something else with it, as a layer with several residual
    streams does, and for the last layer."""

    norm: nn.Module | None
    scale: float | None


def norm_of(site: ExpertsSite) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """The norm before `site`'s router, [..., H] -> [..., H], fires no hooks; None where the router's input is not a
    norm's output. Available after `find_contexts` (or `watch`) has run on the model."""
    norm = context_of(site).norm
    return None if norm is None else norm.forward


def context_of(site: ExpertsSite) -> RouterContext:
    """The result of `find_contexts` for this site."""
    found: RouterContext = getattr(site.router, CONTEXT, RouterContext(None, None))
    return found


def has_quasi_hidden(site: ExpertsSite, following: ExpertsSite) -> bool:
    """Whether `quasi_hidden` can be made between these two layers, given the residual stream of the first."""
    return context_of(site).scale is not None and context_of(following).norm is not None


def quasi_hidden(
    site: ExpertsSite, following: ExpertsSite, residual: torch.Tensor, output: torch.Tensor
) -> torch.Tensor:
    """[T, H] quasi-hidden state q = Norm_following(r + c * D): `residual` r [T, H] of `site`, `output` D [T, H] fp32 =
    sum over its chosen experts of weight * default vector, c = the factor with which it adds its experts' output
    (Speculating Experts section 3.2). Needs `has_quasi_hidden`."""
    scale, norm = context_of(site).scale, norm_of(following)
    assert scale is not None and norm is not None, "there is no quasi-hidden state between these layers"
    return norm(residual + (scale * output).to(residual.dtype))


def find_contexts(model: Any, sites: Sequence[ExpertsSite]) -> list[RouterContext]:
    """Run three tokens up to the last router, with experts replaced by noise, and record which module feeds each
    router. A second call for the same model runs nothing. Hooks already in the model fire, as in any pass; its caches
    are not touched. Of a model whose own code does not run that way nothing is known, which the log says."""
    if not all(hasattr(site.router, CONTEXT) for site in sites):
        for site, place in zip(sites, _run(model, sites), strict=True):
            setattr(site.router, CONTEXT, place)
    return [context_of(site) for site in sites]


def _run(model: Any, sites: Sequence[ExpertsSite]) -> list[RouterContext]:
    run = _Run(model, sites)
    try:
        with torch.no_grad(), _noise(sites, run):
            model(input_ids=torch.tensor([TOKENS], device=model.device), use_cache=False)
    except _Enough:
        pass
    except Exception as error:  # the model's own code, run as transformers does not run it
        log.warning("The norms before the routers stay unknown: without experts the model stops (%s)", reason(error))
        return [RouterContext(None, None)] * len(sites)
    finally:
        run.remove()
    return [RouterContext(run.norm.get(site.index), run.scale.get(site.index)) for site in sites]


class _Enough(Exception):
    """The last router has run; ends the pass."""


class _Run:
    """The hooks of one run, and their observations."""

    def __init__(self, model: Any, sites: Sequence[ExpertsSite]) -> None:
        self._last = len(sites) - 1
        self._normed: list[tuple[nn.Module, torch.Tensor]] = []  # (norm, its output) since the last router
        self._again = False  # a layer runs for the second time
        self.noise = 1.0
        self.norm: dict[int, nn.Module] = {}
        self.scale: dict[int, float | None] = {}
        self.added: dict[int, torch.Tensor] = {}  # a layer's noise, at factor 1
        width = model.get_input_embeddings().weight.shape[-1]
        self._handles = [m.register_forward_hook(self._norm_ran) for m in model.modules() if _norm_like(m, width)]
        for site in sites:
            self._handles += [
                site.router.register_forward_pre_hook(partial(self._router_runs, site.index), with_kwargs=True),
                _layer(model, site.name).register_forward_hook(partial(self._layer_ran, site.index), with_kwargs=True),
            ]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _norm_ran(self, module: nn.Module, args: Any, output: torch.Tensor) -> None:
        self._normed.append((module, output))

    def _router_runs(self, index: int, module: nn.Module, args: Any, kwargs: Any) -> None:
        given: torch.Tensor = next(iter((*args, *kwargs.values())))
        if feeding := [norm for norm, after in reversed(self._normed) if _is(after, given)]:
            self.norm[index] = feeding[0]
        self._normed.clear()
        if index == self._last:
            raise _Enough

    def _layer_ran(self, index: int, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self._again:
            return
        self._again, self.noise = True, 2.0
        try:
            more = module.forward(*args, **kwargs)
        finally:
            self._again, self.noise = False, 1.0
        self._normed.clear()
        rounding = torch.finfo(self.added[index].dtype).eps
        self.scale[index] = _multiple(_states(more), _states(output), self.added[index].float(), rounding)


def _layer(model: nn.Module, name: str) -> nn.Module:
    """The model layer that contains `name`: the innermost module that is an item of a list."""
    parts = name.split(".")
    at = max(i for i, part in enumerate(parts) if part.isdigit())
    return model.get_submodule(".".join(parts[: at + 1]))


@contextmanager
def _noise(sites: Sequence[ExpertsSite], run: _Run) -> Iterator[None]:
    """Replace the experts by noise of `run.noise` times their input's magnitude."""

    def forward(index: int, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        run.added[index] = hidden.flip(-1) * LOUD
        return run.added[index] * run.noise

    before = [vars(site.module).get("forward") for site in sites]
    try:
        for site in sites:
            vars(site.module)["forward"] = partial(forward, site.index)
        yield
    finally:
        for site, shadow in zip(sites, before, strict=True):
            del vars(site.module)["forward"]
            if shadow is not None:
                vars(site.module)["forward"] = shadow


def _norm_like(module: nn.Module, width: int) -> bool:
    """Whether a module has only vector parameters of the model's width, at least one, and no submodules."""
    shapes = [p.shape for p in module.parameters()]
    return bool(shapes) and next(module.children(), None) is None and all(s == (width,) for s in shapes)


def _is(normed: torch.Tensor, given: torch.Tensor) -> bool:
    """Whether `given` is `normed`, as a view or a copy."""
    same = normed.untyped_storage().data_ptr() == given.untyped_storage().data_ptr()
    return normed.numel() == given.numel() and (same or torch.equal(normed.reshape(given.shape), given))


def _states(output: Any) -> torch.Tensor:
    """The hidden states [T, H] in a layer's output, as fp32."""
    states: torch.Tensor = output if isinstance(output, torch.Tensor) else output[0]
    return states.reshape(-1, states.shape[-1]).float()


def _multiple(after: torch.Tensor, before: torch.Tensor, added: torch.Tensor, rounding: float) -> float | None:
    """c with after = before + c * added within the rounding of either; None if there is none, or `added` [T, H] is not
    of their shape."""
    if added.shape != before.shape:
        return None
    change = after - before
    scale = float((change * added).sum() / (added * added).sum())
    off = (change - scale * added).abs() - 2 * rounding * torch.maximum(after.abs(), before.abs())
    return scale if bool(off.clamp_min(0.0).norm() < 0.02 * change.norm()) else None
