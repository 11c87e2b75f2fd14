"""One piece of device memory, as large as a block of an expert. It does not record which block it holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # a simulated cache needs no torch
    import torch

    from core.memory.codec import SlotParts


@dataclass(slots=True)
class Slot:
    """A slot's bytes, their typed views, and the fence after the last computation that read it."""

    index: int
    raw: torch.Tensor  # uint8 [slot_bytes]
    parts: SlotParts  # typed views into raw
    fence: Any = None  # CUDA event after the last computation that read this slot; None on CPU
