"""Llama 4: one expert per token, whose input is the state times its score."""

from typing import Any

import torch

from core.errors import ModelError
from core.hf.expert_attributes import already_adapted, override_methods, set_expert_attributes

OFF = 1e-6  # transformers computes every expert for all tokens (zero state if not selected): more rows


def adapt_llama4(block: Any) -> None:
    """Adapt one block. Raises ModelError where a token uses several experts, which no published model does."""
    if block.top_k != 1:
        raise ModelError(
            f"This model has {block.top_k} experts a token, and each is given another state, which can be "
            "run for one expert a token only. Choose another model."
        )
    if already_adapted(block):
        return
    set_expert_attributes(block.experts, close=OFF, is_transposed=True)
    override_methods(block.router, forward=_route)
    override_methods(block, forward=_block)


def _route(self: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """logits [T, E], weights [T, 1] all 1, ids [T, 1], and scores [T, 1], which the states are multiplied by."""
    logits = torch.nn.Linear.forward(self, hidden_states)
    best, ids = torch.topk(logits, 1, dim=1)
    scores = best.float().sigmoid().to(logits.dtype)
    return logits, torch.ones_like(scores), ids, scores


def _block(self: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    states = hidden_states.reshape(-1, self.hidden_dim)
    logits, weights, ids, scores = self.router(states)
    out = self.shared_expert(states)
    out.add_(self.experts(states * scores, ids, weights))
    return out, logits
