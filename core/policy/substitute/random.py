"""Substitutes a random resident expert: the baseline for other substitutes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from core.policy.substitute.base import Ask, Substitute, SubstituteProfile
from core.settings.registry import register

if TYPE_CHECKING:
    import torch
    from torch import Tensor

WORD = 0xFFFFFFFF
ODD = 0x2C1B3C6D, 0x297A2D39, 0x1B56C4E9  # below 2^31, so that a product with a word fits into 63 bits
STEPS = 1 << 24  # distinct values of a draw, each exact in fp32


@register(
    "substitute",
    "random",
    title="Random",
    help="A random resident expert. What a substitute must beat.",
    source="control; BuddyMoE section 5.1 (random replacement)",
)
class Random(Substitute):
    """Score: uniform in [0, 1), a hash of the layer, the selected expert with its weight, and the candidate.
    Equal inputs give equal scores, in any batch; weights differ from token to token, and so do the scores. There is one
    sequence and no seed to choose another: a control has to repeat, and an answer has draws enough."""

    def prepare(self, profile: SubstituteProfile | None, layers: int, experts: int, device: torch.device) -> None:
        import torch

        self.experts = experts
        self._each = _mixed(np.arange(experts, dtype=np.int64) * 2 + 1, ODD[0])
        self._column = torch.from_numpy(self._each).to(device)

    def listed(self, ask: Ask, token: int, position: int, expert: int) -> Iterable[tuple[int, float]]:
        weight = int(ask.numbers("weights", token)[position] * STEPS)
        word = _mixed(_mixed(self._salt(ask.layer) ^ weight & WORD, ODD[1]) ^ expert, ODD[2])
        draws: list[float] = (_draws(self._each ^ word) / STEPS).tolist()
        return enumerate(draws)

    def column(self, ask: Ask, position: int) -> tuple[Tensor | None, Tensor]:
        of = ask.ids[:, position : position + 1]
        weight = (ask.weights[:, position : position + 1].double() * STEPS).long()
        words = _mixed(_mixed((weight & WORD) ^ self._salt(ask.layer), ODD[1]) ^ of, ODD[2])
        return None, _draws(self._column ^ words).float() / STEPS

    def _salt(self, layer: int) -> int:
        return int(_mixed(1, ODD[0])) ^ int(_mixed(layer + 1, ODD[1]))


def _draws(words: Any) -> Any:
    """Random words below 2^32 -> numbers below STEPS."""
    return (words * ODD[1] & WORD) >> 8


def _mixed(words: Any, odd: int) -> Any:
    """Mix words below 2^32 so that their low bits depend on all bits; for ints, arrays and tensors alike."""
    words = words * odd & WORD
    words = (words ^ words >> 15) * ODD[0] & WORD
    return words ^ words >> 13
