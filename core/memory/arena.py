"""Device slots: each holds one block of an expert in a layout that kernels compute from directly.

In host memory every slot is a separate allocation; on a GPU many share one (core.memory.slabs). The arena can shrink by
any number of slots between two tokens, and the bytes it reports are the bytes allocated. It does not track which expert
is in which slot.
"""

from collections.abc import Callable, Iterable
from functools import partial

import torch

from core.memory.codec import Codec, SlotParts
from core.memory.pages import aligned, page_up
from core.memory.slabs import Slabs
from core.memory.slot import Slot
from core.memory.spilled import may_spill, spilled_bytes

__all__ = ["Arena", "Slot"]

NOTHING = torch.empty(0, dtype=torch.uint8)


class Arena:
    """Allocates and frees slots. When an allocation fails, torch's out-of-memory error propagates and nothing was
    allocated."""

    def __init__(self, codec: Codec, device: torch.device, paged: bool = False) -> None:
        """`paged`: slots consist of whole pages, so that disk reads can target them directly; CPU only."""
        self.codec, self.device = codec, device
        self._new: Callable[[int], torch.Tensor] = aligned if paged else partial(torch.empty, dtype=torch.uint8)
        self._slot_bytes = page_up(codec.slot_bytes) if paged else codec.slot_bytes
        self._slabs = Slabs(codec.slot_bytes, device) if device.type == "cuda" else None
        self._slots: dict[int, Slot] = {}
        self._next = 0

    def expect(self, count: int) -> None:
        """Set the number of slots: what follows allocates or frees the difference."""
        if self._slabs is not None:
            self._slabs.expected = count

    def allocate(self) -> Slot:
        """A new, uninitialised slot."""
        slot = Slot(self._next, NOTHING, SlotParts({}, {}))
        with torch.inference_mode(False):  # other threads write into it, outside inference mode
            self._give(slot, self._slabs.take(slot) if self._slabs is not None else self._new(self._slot_bytes))
        self._slots[slot.index] = slot
        self._next += 1
        return slot

    def free(self, slot: Slot) -> None:
        """Free a slot's memory, even if the slot is still referenced. No thread or kernel may read or write it."""
        if slot.fence is not None:
            slot.fence.synchronize()
        self._take_back(slot)
        del self._slots[slot.index]

    def pack(self, busy: Iterable[Slot]) -> None:
        """Give back what freed slots left between others, by moving these; only between two passes. `busy`: slots with
        copies that are not over, which cannot be moved."""
        if self._slabs is not None and self._slabs.loose:
            stays = {slot.index for slot in busy}  # before the device is waited for: what is not in it is over then
            torch.cuda.synchronize(self.device)
            with torch.inference_mode(False):
                self._slabs.pack(stays, self._move)
        if self._slabs is not None:
            torch.cuda.empty_cache()  # freed memory is others', also between two answers

    def spilled_bytes(self) -> int:
        """Bytes of slots that the driver keeps in system memory (core.memory.spilled). Waits for the device."""
        return spilled_bytes(self._slabs.memory) if self._slabs is not None and may_spill(self.device) else 0

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def bytes(self) -> int:
        """Device bytes of all slots."""
        return self._slabs.bytes if self._slabs is not None else len(self._slots) * self._slot_bytes

    def _move(self, slot: Slot, raw: torch.Tensor) -> None:
        raw.copy_(slot.raw, non_blocking=True)
        self._give(slot, raw)

    def _give(self, slot: Slot, raw: torch.Tensor) -> None:
        """A slot's bytes are `raw` from now on."""
        slot.raw, slot.parts = raw, self.codec.views(raw)
        if self.device.type == "cuda":  # pending kernels may still read memory that was freed before
            slot.fence = torch.cuda.Event()
            slot.fence.record()

    def _take_back(self, slot: Slot) -> None:
        slot.raw, slot.parts = NOTHING, SlotParts({}, {})
        if self._slabs is not None:
            self._slabs.leave(slot)
