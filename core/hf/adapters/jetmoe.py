"""JetMoE: experts in the feed-forward layers, which are offloaded, and others in attention, which stay resident."""

from typing import Any

import torch
from torch import nn
from transformers.core_model_loading import WeightRenaming

from core.hf.expert_attributes import already_adapted, override_methods, set_expert_attributes


def adapt_jetmoe(block: Any) -> None:
    """Adapt one feed-forward block."""
    if already_adapted(block):
        return
    experts: Any = nn.Module()
    experts.gate_up_proj, experts.down_proj = block.input_linear.weight, block.output_linear.weight
    experts.act_fn = block.activation
    set_expert_attributes(
        experts,
        num_experts=block.router.num_experts,
        conversions=(
            WeightRenaming("mlp.input_linear.weight", "mlp.experts.gate_up_proj"),
            WeightRenaming("mlp.output_linear.weight", "mlp.experts.down_proj"),
        ),
    )
    del block.input_linear, block.output_linear
    block.experts = experts
    override_methods(block.router, forward=_route)
    override_methods(block, forward=_block)


def adapt_jetmoe_attention(block: Any) -> None:
    """Make the attention experts measurable on the meta device, where tokens per expert cannot be counted."""
    if not already_adapted(block):
        override_methods(block.router, forward=_counted(type(block.router).forward))


def _route(self: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """logits [T, E] float32, weights and ids [T, k]."""
    logits = self.layer(hidden_states).float()
    best, ids = logits.topk(self.top_k, dim=1)
    return logits, torch.softmax(best, dim=1).type_as(hidden_states), ids


def _block(self: Any, layer_input: torch.Tensor) -> torch.Tensor:
    states = layer_input.reshape(-1, self.input_size)
    _, weights, ids = self.router(states)
    out: torch.Tensor = self.experts(states, ids, weights).view(layer_input.shape) + self.bias
    return out


def _counted(choose: Any) -> Any:
    def forward(self: Any, hidden_states: torch.Tensor) -> tuple[Any, ...]:
        """The router's own output; on the meta device as if all tokens selected the first expert."""
        if not hidden_states.is_meta:
            return choose(self, hidden_states)  # type: ignore[no-any-return]
        logits = self.layer(hidden_states).float()
        pairs = len(hidden_states) * self.top_k
        index, counts = torch.arange(pairs, device="meta"), [pairs] + [0] * (self.num_experts - 1)
        return index, index // self.top_k, hidden_states.new_empty(pairs), counts, logits

    return forward
