"""Phi-MoE's stretched rotary embedding, whose own code decides by positions on the device which of two factors to
multiply by: where both are the same there is nothing to decide."""

from typing import Any

import torch

from core.hf.expert_attributes import override_methods

FREQUENCIES = "_moestro_frequencies"


def adapt_phimoe_rotary(rotary: Any) -> None:
    """Adapt one rotary embedding. Those with two factors stay as they are."""
    rope = rotary.config.rope_parameters
    if rope["rope_type"] != "default" and rope.get("short_mscale") == rope.get("long_mscale"):
        override_methods(rotary, forward=_forward)


def _forward(self: Any, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [B, T, head], rounded as in transformers, which uses the frequencies of short texts for all."""
    frequencies = vars(self).get(FREQUENCIES)
    if frequencies is None or frequencies.device != x.device:  # once, and again where the model has moved
        frequencies = self.rope_init_fn(self.config)[0].to(device=x.device, dtype=torch.float)
        vars(self)[FREQUENCIES] = frequencies
    freqs = position_ids[..., None].float() * frequencies
    both, scale = torch.cat((freqs, freqs), dim=-1), self.config.rope_parameters["short_mscale"]
    return (both.cos() * scale).to(x.dtype), (both.sin() * scale).to(x.dtype)
