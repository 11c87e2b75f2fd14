"""Device slots: each holds one expert's bytes, ready to compute from.

A slot is an allocation of its own, so that the arena can shrink by exactly one expert between two tokens and the
bytes it reports are the bytes that are allocated. Which expert is in which slot is not known here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from core.memory.codec import Codec, SlotParts


@dataclass(slots=True)
class Slot:
    """One expert-sized piece of device memory, its typed views, and the last computation that read it."""

    index: int
    raw: torch.Tensor      # uint8 [slot_bytes]
    parts: SlotParts       # typed views into raw
    fence: Any = None      # CUDA event after the last computation from this slot; None on CPU


class Arena:
    """Allocates and frees slots. Raises torch's out-of-memory error to the caller, having allocated nothing."""

    def __init__(self, codec: Codec, device: torch.device) -> None:
        self.codec, self.device = codec, device
        self._slots: dict[int, Slot] = {}
        self._next = 0

    def allocate(self) -> Slot:
        """A new, uninitialised slot."""
        with torch.inference_mode(False):  # other threads write into it, outside any inference mode
            raw = torch.empty(self.codec.slot_bytes, dtype=torch.uint8, device=self.device)
            slot = Slot(self._next, raw, self.codec.views(raw))
        self._slots[slot.index] = slot
        self._next += 1
        return slot

    def free(self, slot: Slot) -> None:
        """Give a slot's memory back. Nothing may still read or write it."""
        if slot.fence is not None:
            slot.fence.synchronize()
        del self._slots[slot.index]

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def bytes(self) -> int:
        """Device bytes of all slots."""
        return len(self._slots) * self.codec.slot_bytes
