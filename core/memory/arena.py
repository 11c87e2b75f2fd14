"""Device slots: each holds one block of an expert in a layout that kernels compute from directly.

In host memory every slot is a separate allocation; on a GPU many share one (core.memory.slabs). The arena can shrink by
any number of slots between two tokens, and the bytes it reports are the bytes allocated. It does not track which expert
is in which slot.
"""

from collections.abc import Callable
from functools import partial

import torch

from core.memory.codec.layers import LayerCodecs
from core.memory.pages import aligned, page_up
from core.memory.slabs import Slabs
from core.memory.slot import Slot
from core.memory.spilled import may_spill, spilled_bytes

__all__ = ["Arena", "Slot"]

NOTHING = torch.empty(0, dtype=torch.uint8)


class Arena:
    """Allocates and frees slots. When an allocation fails, torch's out-of-memory error propagates and nothing was
    allocated."""

    def __init__(self, codecs: LayerCodecs, device: torch.device, paged: bool = False) -> None:
        """Slots have room for a block of any expert, or of those of one layer: see `expect`. `paged`: they consist of
        whole pages, so that disk reads can target them directly; CPU only."""
        self.codecs, self.device = codecs, device
        self._new: Callable[[int], torch.Tensor] = aligned if paged else partial(torch.empty, dtype=torch.uint8)
        self._widest, *self._of_layer = (
            page_up(size) if paged else size for size in (codecs.slot_bytes, *(one.slot_bytes for one in codecs))
        )
        self._by_layer, self._taken = False, 0  # bytes, on a CPU
        self._slabs = Slabs(codecs.slot_bytes, device) if device.type == "cuda" else None
        self._slots: dict[int, Slot] = {}
        self._next = 0

    def expect(self, count: int, by_layer: bool = False) -> bool:
        """Set the number of slots: what follows allocates or frees the difference. `by_layer`: slots serve one layer
        each. Returns whether some have another size then than others; on a GPU all have the same."""
        if self._slabs is not None:
            self._slabs.expected = count
        self._by_layer = by_layer and self._slabs is None
        return self._slabs is None and self.codecs.is_mixed

    def allocate(self, layer: int = -1) -> Slot:
        """A new, uninitialised slot, for experts of a layer; -1: of any."""
        slot = Slot(self._next, NOTHING)
        with torch.inference_mode(False):  # other threads write into it, outside inference mode
            self._give(slot, self._slabs.take(slot) if self._slabs is not None else self._new(self._size(layer)))
        self._slots[slot.index] = slot
        self._next += 1
        return slot

    def fits(self, slot: Slot, layer: int) -> bool:
        """Whether a slot has the size of those for a layer."""
        return self._slabs is not None or slot.raw.numel() == self._size(layer)

    def fit(self, slot: Slot, layer: int) -> None:
        """Give a slot that size. It keeps what it holds of an expert; no copy into it may be running. On a CPU."""
        old = slot.raw
        with torch.inference_mode(False):
            new = self._new(self._size(layer))
            both = min(len(old), len(new))
            new[:both].copy_(old[:both])
            self._taken -= len(old)
            self._give(slot, new)

    def free(self, slot: Slot) -> None:
        """Free a slot's memory, even if the slot is still referenced. No thread or kernel may read or write it."""
        if slot.fence is not None:
            slot.fence.synchronize()
        self._take_back(slot)
        del self._slots[slot.index]

    def pack(self, settle: Callable[[], None]) -> None:
        """Give back what freed slots left between others, by moving these; only between two passes. `settle` returns
        when nothing copies into slots any more, which may be long after the pass: the budget is kept from now on."""
        if self._slabs is not None and self._slabs.loose:
            settle()
            torch.cuda.synchronize(self.device)
            with torch.inference_mode(False):
                self._slabs.pack(self._move)
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
        return self._slabs.bytes if self._slabs is not None else self._taken

    def _size(self, layer: int) -> int:
        return self._of_layer[layer] if self._by_layer and layer >= 0 else self._widest

    def _move(self, slot: Slot, raw: torch.Tensor) -> None:
        raw.copy_(slot.raw, non_blocking=True)
        self._give(slot, raw)

    def _give(self, slot: Slot, raw: torch.Tensor) -> None:
        """A slot's bytes are `raw` from now on."""
        slot.move(raw)
        self._taken += len(raw)
        if self.device.type == "cuda":  # pending kernels may still read memory that was freed before
            slot.fence = torch.cuda.Event()
            slot.fence.record()

    def _take_back(self, slot: Slot) -> None:
        self._taken -= len(slot.raw)
        slot.move(NOTHING)
        if self._slabs is not None:
            self._slabs.leave(slot)
