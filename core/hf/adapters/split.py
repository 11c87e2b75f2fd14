"""ERNIE 4.5 VL: half of the experts serve text and half serve images, each half with a router of its own."""

from __future__ import annotations

from typing import Any

from torch import nn

from core.hf.adapters.marks import STORED, again


def adapt_split(block: Any) -> None:
    """Take the experts for images out; a checkpoint stores them behind the others."""
    if again(block):
        return
    block.vision_moe.experts = nn.Module()
    experts = block.text_moe.experts
    setattr(experts, STORED, (2 * experts.num_experts,))
