"""Recognises the activation of a module by trying it on random gates and ups, some of which are beyond its limits."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from core.memory.codec.fast.steps import named, single
from core.runtime.program import gate
from core.runtime.program.weights import near

LIMITS, SLOPES = ("swiglu_limit", "limit"), ("swiglu_alpha", "alpha")  # a module's names for them
FORMS = (
    gate.Gate(1),
    gate.Gate(1, "gelu_tanh"),
    gate.Gate(1, shift=1.0),
    gate.Gate(1, interleaved=True),
    gate.Gate(1, interleaved=True, shift=1.0),
)
PLAIN = gate.Gate(1, "relu2", ups=False), gate.Gate(1, "relu", ups=False), gate.Gate(1, ups=False)
BEYOND = 7.0  # a limit that there may be where none is named


def bounds_of(module: Any) -> tuple[float, float]:
    """The limit of a module's gates and ups, 0 = none, and the slope of its activation."""
    limit, slope = (
        next((float(value) for name in names if isinstance(value := getattr(module, name, None), (int, float))), none)
        for names, none in ((LIMITS, 0.0), (SLOPES, 1.0))
    )
    return (0.0 if limit == float("inf") else limit), slope


@torch.inference_mode()
def activation_of(
    module: Any, apply: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, width: int
) -> gate.Gate | None:
    """The form whose hidden states [T, width] are those that `apply` makes of rows x [T, n] fp32, and of larger ones;
    None where none is known. n: `width`, or twice that with ups."""
    limit, slope = bounds_of(module)
    x = torch.cat([x, x * (8 * (limit or BEYOND) / float(x.abs().max()))])
    wanted = apply(x).split(len(x) // 2)
    forms = FORMS if x.shape[1] == 2 * width else PLAIN
    bounded = [replace(one, slope=slope, limit=limit, of_factors=after) for one in forms for after in (False, True)]
    for form in (*forms, *(bounded if limit or slope != 1 else ())):
        found: gate.Gate = replace(form, width=width)
        got = torch.empty(len(x), width)
        single(gate.kernel(found), named(gate.FIELDS, x=x, out=got), len(x) * found.units)
        if all(near(one, other) for one, other in zip(got.split(len(x) // 2), wanted, strict=True)):
            return found
    return None
