"""ERNIE 4.5 VL: half of the experts process text and half images, each half with its own router."""

from typing import Any

from torch import nn

from core.hf.expert_attributes import STORED, already_adapted


def adapt_split(block: Any) -> None:
    """Remove the image experts; a checkpoint stores them after the text experts."""
    if already_adapted(block):
        return
    block.vision_moe.experts = nn.Module()
    experts = block.text_moe.experts
    setattr(experts, STORED, (2 * experts.num_experts,))
