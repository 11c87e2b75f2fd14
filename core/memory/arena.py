"""Device slots: each holds one expert's bytes, ready to compute from.

A slot is an allocation of its own, so that the arena can shrink by exactly one expert between two tokens and the
bytes it reports are the bytes that are allocated. Which expert is in which slot is not known here.
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
    """Allocates and frees slots. Raises torch's out-of-memory error to the caller, having allocated nothing."""

    def __init__(self, codec: Codec, device: torch.device, paged: bool = False) -> None:
        """`paged`: slots are whole pages, for a disk to write into them; on a CPU only."""
        self.codec, self.device = codec, device
        self._new: Callable[[int], torch.Tensor] = (
            aligned if paged else partial(torch.empty, dtype=torch.uint8, device=device)
        )
        self._slot_bytes = page_up(codec.slot_bytes) if paged else codec.slot_bytes
        self._slots: dict[int, Slot] = {}
        self._next = 0

    def allocate(self) -> Slot:
        """A new, uninitialised slot."""
        with torch.inference_mode(False):  # other threads write into it, outside any inference mode
            raw = self._new(self._slot_bytes)
            slot = Slot(self._next, raw, self.codec.views(raw))
            if self.device.type == "cuda":  # what is still to be computed may read memory that was given back before
                slot.fence = torch.cuda.Event()
                slot.fence.record()
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
        return len(self._slots) * self._slot_bytes
