"""One piece of device memory, as large as a block of an expert. It does not record which block it holds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # a simulated cache needs no torch
    import torch

    from core.memory.codec import Codec, SlotParts


@dataclass(slots=True)
class Slot:
    """A slot's bytes, and the fence after the last computation that read it."""

    index: int
    raw: torch.Tensor  # uint8 [slot_bytes]
    at: int = 0  # the address of its bytes
    fence: Any = None  # CUDA event after the last computation that read this slot; None on CPU
    _parts: dict[Codec, SlotParts] = field(default_factory=dict)

    def parts(self, codec: Codec) -> SlotParts:
        """Typed views into its bytes, as an expert of this codec has them."""
        found = self._parts.get(codec)
        if found is None:
            found = self._parts[codec] = codec.views(self.raw)
        return found

    def move(self, raw: torch.Tensor) -> None:
        """Its bytes are these from now on."""
        self.raw, self.at = raw, raw.data_ptr()
        self._parts.clear()
