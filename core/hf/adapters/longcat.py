"""LongCat Flash: some of the experts that a router selects from are identity functions."""

from typing import Any

import torch
from torch import nn

from core.hf.expert_attributes import already_adapted, override_methods, set_expert_attributes


def adapt_longcat(block: Any) -> None:
    """Adapt one block: the router returns only real experts, plus the weights of the state's identity path."""
    if already_adapted(block):
        return
    experts = block.experts
    real, every = experts.num_routed_experts, experts.total_experts
    set_expert_attributes(experts, num_experts=real, stored=(every,), idle=True)
    rows = experts.gate_up_proj
    experts.gate_up_proj = nn.Parameter(rows[:real].detach(), requires_grad=False)  # the others have no weights
    block.router.num_real = real
    override_methods(block.router, forward=_router(type(block.router).forward))
    override_methods(block, forward=_block)


def _router(choose: Any) -> Any:
    def forward(self: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """logits [T, E], weights and ids [T, k] of real experts, and weights [T, k] of the state itself.

        An identity expert's id is replaced by a real one that the token uses anyway (if none, the first), with weight
        0.
        """
        *first, weights, ids = choose(self, hidden_states)
        logits = first[0] if first else self.classifier(hidden_states.flatten(0, -2))  # transformers before 5.23
        ids, order = ids.sort(-1)
        weights = weights.gather(-1, order)
        through = ids >= self.num_real
        real = ids.masked_fill(through, 0)
        used = torch.where(through, real[:, :1], real)
        return logits[:, : self.num_real], weights.masked_fill(through, 0), used, weights.masked_fill(~through, 0)

    return forward


def _block(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    states = hidden_states.view(-1, hidden_states.shape[-1])
    _, weights, ids, through = self.router(hidden_states)
    out = self.experts(states, ids, weights)
    for share in through.split(1, dim=-1):
        out = out + (states * share).to(out.dtype)
    return out.view(hidden_states.shape)  # type: ignore[no-any-return]
