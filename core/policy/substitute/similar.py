"""Substitutes the expert with the most similar outputs."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np

from core.errors import ProfileError
from core.policy.substitute.base import SubstituteProfile
from core.policy.substitute.table import ScoreTable
from core.settings.registry import register
from core.system.command import COMMAND

if TYPE_CHECKING:
    import torch


@register(
    "substitute",
    "similar",
    title="Most alike",
    help="The resident expert whose outputs were most alike the missing one's, on inputs that both were given.",
    source="control; BuddyMoE figure 4 (functional similarity)",
)
class Similar(ScoreTable):
    """Score = (1 + c) / 2, c = mean cosine of both experts' outputs on the same inputs of their layer."""

    needs: ClassVar[tuple[str, ...]] = ("likeness",)

    def prepare(self, profile: SubstituteProfile | None, layers: int, experts: int, device: torch.device) -> None:
        if profile is None or profile.likeness is None:
            raise ProfileError(
                "Substituting the most alike expert needs a profile that says how alike experts are. "
                f"Run {COMMAND} calibrate, or open the Calibrate tab."
            )
        self.hold((1.0 + np.asarray(profile.likeness, np.float32)) / 2.0, device)
