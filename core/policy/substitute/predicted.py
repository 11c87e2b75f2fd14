"""Substitutes the resident expert with the highest predicted probability."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from core.policy.substitute.base import Ask, Substitute, SubstituteProfile
from core.settings.registry import register

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@register(
    "substitute",
    "predicted",
    title="Prefetcher's choice",
    help="The resident expert that the prefetcher named "
    "with the highest probability for this layer. Needs a prefetcher that names experts.",
    source="ours: the prediction is run, expert by expert",
)
class Predicted(Substitute):
    """Score = the predicted probability; experts that were not predicted are no candidates."""

    named: bool = True

    def prepare(self, profile: SubstituteProfile | None, layers: int, experts: int, device: torch.device) -> None:
        self.experts = experts

    def listed(self, ask: Ask, token: int, position: int, expert: int) -> Iterable[tuple[int, float]]:
        if ask.named is None:
            return ()
        return [(j, score) for j, score in enumerate(ask.numbers("named")) if score > 0]

    def column(self, ask: Ask, position: int) -> tuple[Tensor | None, Tensor]:
        tokens, experts = len(ask.ids), len(ask.ready)
        if ask.named is None:
            return None, ask.weights.new_full((tokens, experts), -float("inf"))
        return None, ask.named.masked_fill(ask.named <= 0, -float("inf")).expand(tokens, experts)
