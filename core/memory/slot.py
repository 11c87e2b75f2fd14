"""One expert-sized piece of device memory. Which expert is in it is not known here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # a cache that is only simulated needs no torch
    import torch

    from core.memory.codec import SlotParts


@dataclass(slots=True)
class Slot:
    """Its bytes, their typed views, and the last computation that read it."""

    index: int
    raw: torch.Tensor  # uint8 [slot_bytes]
    parts: SlotParts  # typed views into raw
    fence: Any = None  # CUDA event after the last computation from this slot; None on CPU
