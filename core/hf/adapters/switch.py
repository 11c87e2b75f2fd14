"""Switch Transformers: one expert a token, each a module of its own, with a limit of tokens that an expert takes of one
sequence in a pass: what is beyond goes on without any. transformers 5.17 counts these tokens along another dimension
than theirs, so that no limit is ever reached; with it, there is none here either."""

from collections.abc import Sequence
from typing import Any

import torch
import transformers
from torch import nn
from transformers.core_model_loading import MergeModulelist, WeightConverter

from core.hf.expert_attributes import already_adapted, override_methods, route_and_compute, set_expert_attributes

UNLIMITED = transformers.__version__.startswith("5.17.")
SHARES = "_moestro_shares"  # on a router: how many of a pass's tokens are of each sequence; absent: all are of one


def adapt_switch(block: Any) -> None:
    """Adapt one block: its experts' matrices are stacked, and its router tells which expert it chose."""
    if already_adapted(block):
        return
    apart, router = block.experts, block.router
    one, count = apart["expert_0"], apart.num_experts
    experts: Any = nn.Module()
    for name, weight in (("up_proj", one.wi.weight), ("down_proj", one.wo.weight)):
        setattr(experts, name, nn.Parameter(weight.new_empty(count, *weight.shape), requires_grad=False))
    experts.act_fn = one.act
    set_expert_attributes(
        experts,
        num_experts=count,
        has_gate=False,
        idle=True,
        conversions=(
            WeightConverter(["experts.expert_*.wi.weight"], "experts.up_proj", operations=[MergeModulelist(dim=0)]),
            WeightConverter(["experts.expert_*.wo.weight"], "experts.down_proj", operations=[MergeModulelist(dim=0)]),
        ),
    )
    router.top_k = 1
    override_methods(router, forward=_route)
    override_methods(block, forward=route_and_compute)
    block.experts = experts


def _route(self: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """logits [T, E] in the router's dtype; weights [T, 1], 0 beyond the expert's limit; ids [T, 1]."""
    rows = hidden_states.reshape(-1, hidden_states.shape[-1])
    self.classifier = self.classifier.to(self.dtype)
    logits = self.classifier(rows.to(self.dtype))
    weights, ids = logits.softmax(-1, dtype=self.dtype).to(rows.dtype).max(-1, keepdim=True)
    shares: Sequence[int] = getattr(self, SHARES, ()) or (len(rows),)
    if not UNLIMITED and max(shares) > self.expert_capacity:
        weights = weights * torch.cat(
            [_taken(some, self.num_experts, self.expert_capacity) for some in ids.split(shares)]
        )
    return logits, weights, ids


def _taken(ids: torch.Tensor, experts: int, most: int) -> torch.Tensor:
    """[T, 1] whether each of one sequence's tokens is among the first that its expert takes."""
    before = nn.functional.one_hot(ids[:, 0], experts).cumsum(0)
    return before.gather(1, ids) <= most
