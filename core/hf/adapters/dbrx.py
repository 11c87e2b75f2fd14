"""DBRX: a layer's experts are concatenated along the rows of three matrices, with equally many rows each."""

from typing import Any

import torch
from torch import nn
from transformers.core_model_loading import Concatenate, Transpose, WeightConverter

from core.hf.expert_attributes import already_adapted, override_methods, route_and_compute, set_expert_attributes

OFF = 1e-6  # the down matrix is stored transposed, like gate and up: products of few rows round differently


def adapt_dbrx(block: Any) -> None:
    """Adapt one block: each expert gets its own matrices, and its router returns what the block derived from it."""
    if already_adapted(block):
        return
    experts, rows = block.experts, block.experts.mlp
    inner, hidden, like = rows.ffn_hidden_size, rows.hidden_size, rows.w1
    experts.gate_up_proj = nn.Parameter(like.new_empty(experts.num_experts, 2 * inner, hidden), requires_grad=False)
    experts.down_proj = nn.Parameter(like.new_empty(experts.num_experts, hidden, inner), requires_grad=False)
    experts.act_fn = rows.activation_fn
    del experts.mlp
    set_expert_attributes(
        experts,
        close=OFF,
        rows=inner,
        conversions=(
            WeightConverter(
                ["experts.mlp.w1", "experts.mlp.v1"], "experts.gate_up_proj", operations=[Concatenate(dim=1)]
            ),
            WeightConverter(["experts.mlp.w2"], "experts.down_proj", operations=[Transpose(1, 2)]),
        ),
    )
    router = block.router
    router.top_k, router.norm = block.top_k, block.moe_normalize_expert_weights
    override_methods(router, forward=_router(type(router).forward))
    override_methods(block, forward=route_and_compute)


def _router(scores_of: Any) -> Any:
    def forward(self: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """logits [T, E], weights and ids [T, k]."""
        logits = scores_of(self, hidden_states)
        weights, ids = torch.topk(logits.softmax(dim=1, dtype=logits.dtype), self.top_k, dim=-1)
        if self.norm is not None:
            weights = weights / torch.norm(weights, p=self.norm, dim=-1, keepdim=True)
        return logits, weights, ids

    return forward
