"""Device slots: each holds one block of an expert in a layout that kernels compute from directly.

Every slot is a separate allocation, so the arena can shrink by exactly one slot between two tokens, and the bytes it
reports are the bytes allocated. The arena does not track which expert is in which slot.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from core.memory.codec import Codec
from core.memory.pages import aligned, page_up
from core.memory.slot import Slot

__all__ = ["Arena", "Slot"]


class Arena:
    """Allocates and frees slots. When an allocation fails, torch's out-of-memory error propagates and nothing was
    allocated."""

    def __init__(self, codec: Codec, device: torch.device, paged: bool = False) -> None:
        """`paged`: slots consist of whole pages, so that disk reads can target them directly; CPU only."""
        self.codec, self.device = codec, device
        self._new: Callable[[int], torch.Tensor] = (
            aligned if paged else partial(torch.empty, dtype=torch.uint8, device=device)
        )
        self._slot_bytes = page_up(codec.slot_bytes) if paged else codec.slot_bytes
        self._slots: dict[int, Slot] = {}
        self._next = 0

    def allocate(self) -> Slot:
        """A new, uninitialised slot."""
        with torch.inference_mode(False):  # other threads write into it, outside inference mode
            raw = self._new(self._slot_bytes)
            slot = Slot(self._next, raw, self.codec.views(raw))
            if self.device.type == "cuda":  # pending kernels may still read memory that was freed before
                slot.fence = torch.cuda.Event()
                slot.fence.record()
        self._slots[slot.index] = slot
        self._next += 1
        return slot

    def free(self, slot: Slot) -> None:
        """Free a slot's memory. No thread or kernel may still read or write it."""
        if slot.fence is not None:
            slot.fence.synchronize()
        del self._slots[slot.index]

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def bytes(self) -> int:
        """Device bytes of all slots."""
        return len(self._slots) * self._slot_bytes
