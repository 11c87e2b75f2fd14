"""Experts in blocks computed as whole ones: the blocks are copied side by side, so that results are those of one block.

For prompts, where copying an expert costs little beside computing many rows with it, and for tokens of a cache that
keeps whole experts anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from core.memory.arena import Slot
from core.memory.codec import Codec
from core.memory.codec.segments import Segments

if TYPE_CHECKING:
    from core.runtime.compute import ExpertMath
    from core.runtime.row_places import Places


class JoiningRoom:
    """Memory of one whole expert on the device, which blocks are copied into. Shared by the layers of a model."""

    def __init__(self, whole: Codec, blocks: Segments) -> None:
        """`blocks`: how slots of `whole` are cut."""
        raw = torch.empty(whole.slot_bytes, dtype=torch.uint8, device=whole.device)
        self._slot, self._blocks = Slot(0, raw, whole.views(raw)), blocks
        self._places = [blocks.places(number, raw) for number in range(len(blocks.segments))]

    def joined(self, blocks: Sequence[Slot]) -> Slot:
        """The expert of which these are all the blocks, until the next call."""
        for number, (places, block) in enumerate(zip(self._places, blocks, strict=True)):
            for place, part in zip(places, self._blocks.views(number, block.raw), strict=True):
                place.copy_(part)
        return self._slot


class JoinedMath:
    """The arithmetic of one layer's experts in blocks, each computed as a whole."""

    def __init__(self, whole: ExpertMath, room: JoiningRoom) -> None:
        self.whole, self._room = whole, room

    def token(self, blocks: Sequence[Slot], x: torch.Tensor, places: Places | None) -> torch.Tensor:
        """One token's state [1, H] through the expert of these blocks -> [1, H]."""
        return self.whole.token([self._room.joined(blocks)], x, places)

    def many(self, blocks: Sequence[Slot], at: slice, x: torch.Tensor, total: int) -> torch.Tensor:
        """States [n, H] through the expert of these blocks -> [n, H]; `at`, `total` as in `ExpertMath.many`."""
        return self.whole.many([self._room.joined(blocks)], [at], x, total)
