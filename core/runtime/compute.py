"""One expert's arithmetic, out of a slot, in the order that transformers' grouped_mm uses: bit-identical to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from core.memory.arena import Slot
from core.memory.codec import Codec
from core.memory.codec.plain import Plain


class ExpertMath:
    """The feed-forward of one MoE layer's experts: up (gate and up together), activation, down.

    Source: transformers.integrations.moe.grouped_mm_experts_forward, whose results it reproduces. `stack` computes
    several experts of one token in one product over copies of their weights; see core.runtime.stacking.
    """

    def __init__(self, experts: Any, codec: Codec) -> None:
        """`experts` is the model's own experts module: its flags and its activation are used, no weights."""
        self._codec = codec
        self._up_name = "gate_up_proj" if experts.has_gate else "up_proj"
        self._bias = bool(experts.has_bias)
        self._gate = experts._apply_gate if experts.has_gate else experts.act_fn
        self._norm = experts.post_expert_norm if getattr(experts, "has_post_expert_norm", False) else None
        self.stack = False

    def up(self, slot: Slot, x: torch.Tensor) -> torch.Tensor:
        """[n, H] -> [n, 2I], before the activation."""
        y = self._codec.linear(slot.parts, self._up_name, x)
        return y.add_(slot.parts.plain[self._up_name + "_bias"]) if self._bias else y

    def activate(self, y: torch.Tensor) -> torch.Tensor:
        """[n, 2I] -> [n, I], the model's own gate."""
        activated: torch.Tensor = self._gate(y)
        return activated

    def down(self, slot: Slot, a: torch.Tensor) -> torch.Tensor:
        """[n, I] -> [n, H]."""
        y = self._codec.linear(slot.parts, "down_proj", a)
        return y.add_(slot.parts.plain["down_proj_bias"]) if self._bias else y

    def token(self, slots: Sequence[Slot], x: torch.Tensor) -> torch.Tensor:
        """One token's state [1, H] through several experts -> [n, H], in the order of `slots`."""
        return self.stacked(slots, x) if self.stack and len(slots) > 1 else self.one_by_one(slots, x)

    def one_by_one(self, slots: Sequence[Slot], x: torch.Tensor) -> torch.Tensor:
        """A product an expert."""
        acts = self.activate(torch.cat([self.up(slot, x) for slot in slots]))
        return torch.cat([self.down(slot, acts[i : i + 1]) for i, slot in enumerate(slots)])

    @property
    def can_stack(self) -> bool:
        """Weights as they are and no biases."""
        return isinstance(self._codec, Plain) and not self._bias

    def stacked(self, slots: Sequence[Slot], x: torch.Tensor) -> torch.Tensor:
        """One product for all. Only where `can_stack`."""
        assert isinstance(self._codec, Plain)
        parts = [slot.parts for slot in slots]
        acts = self.activate(self._codec.stacked(parts, self._up_name, x.expand(len(parts), -1)))
        return self._codec.stacked(parts, "down_proj", acts)

    def combine(self, out: torch.Tensor, weights: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Outputs of all pairs [T * k, H] and router weights [T, k] -> [T, H], summed in top-k order."""
        if self._norm is not None:
            out = self._norm(out)
        tokens, k = weights.shape
        weighted = out * weights.reshape(-1, 1)
        return weighted.view(tokens, k, -1).sum(dim=1).to(dtype)
