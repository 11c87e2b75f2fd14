"""RMS norms on a GPU in one or two launches, where a model's own code takes about eight.

The models' code rounds after the division and again after the weight; torch's fused kernel rounds once, and may sum in
another order. Which of its two forms gives the very bits of a module depends on the GPU and on torch: each is tried on
random states, and where both fail the model's own code stays.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.functional import rms_norm

from core.hf.own_forward import OWN

Forward = Callable[[torch.Tensor], torch.Tensor]
DEVICE = "cuda"  # the only one where launches take longer than what they compute
ELEMENTS = 1 << 18  # numbers compared in the trial of a kind of norm


class Kind(NamedTuple):
    """Norms that are computed by the same code."""

    module: type[nn.Module]
    width: int
    epsilon: float
    dtype: torch.dtype
    device: torch.device


def at_once(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """x [..., width] -> the same shape, weight [width] included."""
    return rms_norm(x, weight.shape, weight, epsilon)


def in_two(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """The same, rounded before the weight as well."""
    return rms_norm(x, weight.shape, None, epsilon) * weight


FORMS: tuple[Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor], ...] = (at_once, in_two)


def fuse(model: nn.Module) -> list[nn.Module]:
    """Replace the `forward` of every norm on a GPU for which a form has the bits of the module's own; returns those
    modules."""
    tried: dict[Kind, Any] = {}
    found: list[nn.Module] = []
    for module in model.modules():
        if (kind := kind_of(module)) is None:
            continue
        if kind not in tried:
            tried[kind] = next((form for form in FORMS if units_off(module, kind, form) == 0.0), None)
        form = tried[kind]
        if form is not None and units_off(module, kind, form, 1) == 0.0:  # its own weights once more
            vars(module)[OWN] = functools.partial(form, weight=module.get_parameter("weight"), epsilon=kind.epsilon)
            found.append(module)
    return found


def kind_of(module: nn.Module) -> Kind | None:
    """Of a module that may be a norm on a GPU; None for all others."""
    weights = list(module.named_parameters())
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if [name for name, _ in weights] != ["weight"] or not isinstance(epsilon, float) or OWN in vars(module):
        return None
    weight = weights[0][1]
    if weight.dim() != 1 or weight.device.type != DEVICE or not weight.is_floating_point():
        return None
    if len(inspect.signature(module.forward).parameters) != 1:  # such as gates
        return None
    return Kind(type(module), weight.numel(), epsilon, weight.dtype, weight.device)


@torch.inference_mode()
def units_off(module: nn.Module, kind: Kind, form: Callable[..., torch.Tensor], rows: int = 0) -> float:
    """By how many units of the number type, at most, a form's results differ from the module's own; infinite where it
    cannot be compared. Of `rows` random states, by default of ELEMENTS numbers."""
    rows = rows or max(1, ELEMENTS // kind.width)
    random = torch.Generator().manual_seed(0)
    x = torch.randn(1, rows, kind.width, generator=random) * 4 ** torch.randn(1, rows, 1, generator=random)
    x = x.to(kind.dtype).to(kind.device)
    try:
        got, want = form(x, module.get_parameter("weight"), kind.epsilon), module.forward(x)
        if got.dtype != want.dtype or got.shape != want.shape:
            return float("inf")
        if torch.equal(got, want):
            return 0.0
        unit = torch.finfo(kind.dtype).eps
        off = (got.float() - want.float()).abs() / want.float().abs().clamp_min(torch.finfo(kind.dtype).tiny)
        worst = float(off.max()) / unit
    except Exception:  # a module that is not a norm rejects this input
        return float("inf")
    return worst if worst == worst else float("inf")
