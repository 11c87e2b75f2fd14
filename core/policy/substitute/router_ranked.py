"""Substitutes the resident expert that the token's router ranks highest among those that it did not select."""

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
    "router_ranked",
    title="Router's next best",
    help="The resident expert with the highest router score that the token does not have yet. Needs no profile.",
    source="control; what expert-skipping caches do",
)
class RouterRanked(Substitute):
    """Score = the router's logit."""

    logits: bool = True

    def prepare(self, profile: SubstituteProfile | None, layers: int, experts: int, device: torch.device) -> None:
        self.experts = experts

    def listed(self, ask: Ask, token: int, position: int, expert: int) -> Iterable[tuple[int, float]]:
        assert ask.logits is not None
        return enumerate(ask.numbers("logits", token))

    def column(self, ask: Ask, position: int) -> tuple[Tensor | None, Tensor]:
        assert ask.logits is not None
        return None, ask.logits
