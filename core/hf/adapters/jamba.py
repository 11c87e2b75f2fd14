"""Jamba, as transformers before 5.21 has it: its router is a plain linear layer, and the block chooses the experts."""

from typing import Any

import torch

from core.hf.expert_attributes import already_adapted, override_methods


def adapt_jamba(block: Any) -> None:
    """Adapt one block whose router does not choose by itself."""
    if type(block.router) is not torch.nn.Linear or already_adapted(block):
        return
    block.router.top_k = block.top_k
    override_methods(block.router, forward=_route)
    override_methods(block, forward=_block)


def _route(self: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """logits [T, E], weights [T, k] in the states' dtype, ids [T, k]."""
    logits = torch.nn.Linear.forward(self, hidden_states)
    weights, ids = torch.topk(logits.softmax(-1, dtype=torch.float), self.top_k, dim=-1)
    return logits, weights.to(hidden_states.dtype), ids


def _block(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    states = hidden_states.view(-1, hidden_states.shape[-1])
    _, weights, ids = self.router(states)
    return self.experts(states, ids, weights).reshape(hidden_states.shape)  # type: ignore[no-any-return]
