"""What transformers' experts interface marks experts with, and what we add."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

ASCENDING = "_moestro_ascending"  # on experts whose outputs are added up in the order of experts, not of choice
CLOSE = "_moestro_close"  # on experts whose products round otherwise than transformers': see `mark`
IDLE = "_moestro_idle"  # on experts that a pair of weight 0 does not use
CONVERSIONS = "_moestro_conversions"  # on experts: how a checkpoint's tensors become theirs, beside what is known
ROWS = "_moestro_rows"  # on experts that a checkpoint stores below one another: rows of each, else 0
STORED = "_moestro_stored"  # on experts: how many a checkpoint may have in place of `num_experts`
MARKS = {"has_gate": True, "has_bias": False, "is_transposed": False, "is_concatenated": True}


def mark(
    experts: Any,
    num_experts: int | None = None,
    stored: tuple[int, ...] = (),
    close: float = 0.0,
    idle: bool = False,
    rows: int = 0,
    conversions: Sequence[Any] = (),
    **marks: bool,
) -> None:
    """Make experts with `gate_up_proj`, `down_proj` and `act_fn` look like those that the interface serves.

    `close`: their results differ from transformers' in the last bits, as products of more or fewer rows do; a bound of
    how far logits of a tiny random model were found to be off in fp32, as a share of the largest. `rows`: of each
    expert in a matrix that holds all of them.
    """
    for name, value in {
        **MARKS,
        **marks,
        ASCENDING: True,
        STORED: stored,
        CLOSE: close,
        IDLE: idle,
        ROWS: rows,
        CONVERSIONS: tuple(conversions),
    }.items():
        setattr(experts, name, value)
    if num_experts is not None:
        experts.num_experts = num_experts
    if not hasattr(type(experts), "_apply_gate"):
        experts._apply_gate = lambda both: _gate(experts, both)


def _gate(experts: Any, both: Any) -> Any:
    """[n, 2I] -> [n, I]."""
    gate, up = both.chunk(2, dim=-1)
    return experts.act_fn(gate) * up


def become(module: nn.Module, **methods: Any) -> None:
    """Give one module methods of its own: it becomes an instance of a subclass of its class, of the same name."""
    kind = type(module)
    module.__class__ = type(kind.__name__, (kind,), {"__module__": kind.__module__, **methods})


def again(module: nn.Module) -> bool:
    """Whether a module was adapted before; from now on it was."""
    before = hasattr(module, "_moestro_adapted")
    module._moestro_adapted = True  # type: ignore[assignment]
    return before
