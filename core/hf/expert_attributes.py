"""Attributes that transformers' experts interface sets on experts, and our additional ones."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

ASCENDING = "_moestro_ascending"  # on experts whose outputs are summed in the order of experts, not of selection
CLOSE = "_moestro_close"  # on experts whose products round differently from transformers': see `set_expert_attributes`
IDLE = "_moestro_idle"  # on experts that are not needed for pairs of weight 0
CONVERSIONS = "_moestro_conversions"  # on experts: conversions of checkpoint tensors, in addition to transformers'
ROWS = "_moestro_rows"  # on experts that a checkpoint concatenates along rows: rows of each, else 0
STORED = "_moestro_stored"  # on experts: alternative expert counts of a checkpoint, besides `num_experts`
DEFAULTS = {"has_gate": True, "has_bias": False, "is_transposed": False, "is_concatenated": True}


def set_expert_attributes(
    experts: Any,
    num_experts: int | None = None,
    stored: tuple[int, ...] = (),
    close: float = 0.0,
    idle: bool = False,
    rows: int = 0,
    conversions: Sequence[Any] = (),
    **attributes: bool,
) -> None:
    """Give experts with `gate_up_proj`, `down_proj` and `act_fn` the attributes of those that the interface supports.

    `close`: their results differ from transformers' in the last bits, because products of more or fewer rows do; the
    bound is the logit deviation measured on a tiny random model in fp32, relative to the largest logit. `rows`: rows
    per expert in a matrix that holds all of them.
    """
    for name, value in {
        **DEFAULTS,
        **attributes,
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


def override_methods(module: nn.Module, **methods: Any) -> None:
    """Give one module its own methods: its class becomes a subclass of the same name."""
    kind = type(module)
    module.__class__ = type(kind.__name__, (kind,), {"__module__": kind.__module__, **methods})


def already_adapted(module: nn.Module) -> bool:
    """Whether a module was adapted before; marks it as adapted."""
    before = hasattr(module, "_moestro_adapted")
    module._moestro_adapted = True  # type: ignore[assignment]
    return before


def route_and_compute(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """The forward pass of a block whose router returns (logits, weights [T, k], ids [T, k]): its experts' sum for
    hidden states [..., hidden]."""
    _, weights, ids = self.router(hidden_states)
    states = hidden_states.reshape(-1, hidden_states.shape[-1])
    return self.experts(states, ids, weights).view(hidden_states.shape)  # type: ignore[no-any-return]
