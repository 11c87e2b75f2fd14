"""Device memory of slots on a GPU: many of them in one allocation, given back with the last one in it.

torch takes memory for tensors of 1 to 10 MiB in segments of 20 MiB, and for larger ones in multiples of 2 MiB. Slots
allocated one by one leave what is over in each segment unused; a slab fills its segment.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from core.memory.slot import Slot

SEGMENT = 2 << 20  # bytes: torch rounds large allocations up to multiples
SLAB_BYTES = 64 << 20
EDGE = 256  # bytes: slots begin at multiples of it


def stride_of(slot_bytes: int) -> int:
    """Bytes from one slot to the next."""
    return -(-slot_bytes // EDGE) * EDGE


def slab_slots(slot_bytes: int) -> int:
    """Slots of a slab: as many as SLAB_BYTES hold, or down to half of them where that leaves less of the last segment
    unused."""
    stride = stride_of(slot_bytes)
    most = max(1, SLAB_BYTES // stride)
    return min(range(most, most // 2, -1), key=lambda n: (_segments(n * stride) / n, -n))


def slot_cost(slot_bytes: int) -> int:
    """Bytes of device memory that torch reserves for a slot: its share of a slab's segments."""
    n = slab_slots(slot_bytes)
    return -(-_segments(n * stride_of(slot_bytes)) // n)


def _segments(size: int) -> int:
    return -(-size // SEGMENT) * SEGMENT


@dataclass(eq=False, slots=True)
class Slab:
    """One allocation. `free` and `held` have the slot at each place."""

    memory: torch.Tensor  # uint8 [places * stride]
    free: list[int]
    held: dict[int, Slot] = field(default_factory=dict)


class Slabs:
    """The memory of slots of one size."""

    def __init__(self, slot_bytes: int, device: torch.device) -> None:
        self._bytes, self._stride, self._device = slot_bytes, stride_of(slot_bytes), device
        self._most, self._cost = slab_slots(slot_bytes), slot_cost(slot_bytes)
        self._slabs: list[Slab] = []
        self._of: dict[int, tuple[Slab, int]] = {}  # slot's index -> its slab, and its place there
        self.expected = 0
        """How many slots there are to be: a new slab has no more places than that leaves."""

    @property
    def bytes(self) -> int:
        """Device bytes of all slabs."""
        return self._places * self._cost

    @property
    def memory(self) -> list[torch.Tensor]:
        """Of each slab."""
        return [slab.memory for slab in self._slabs]

    def take(self, slot: Slot) -> torch.Tensor:
        """Memory for a slot. Raises torch.OutOfMemoryError, with nothing allocated."""
        slab = max((one for one in self._slabs if one.free), key=lambda one: len(one.held), default=None)
        if slab is None:
            slab = self._new(min(self._most, max(1, self.expected - len(self._of))))
        return self._put(slot, slab)

    def leave(self, slot: Slot) -> None:
        """Take back a slot's memory."""
        slab, at = self._of.pop(slot.index)
        del slab.held[at]
        slab.free.append(at)
        if not slab.held:
            self._slabs.remove(slab)

    def pack(self, move: Callable[[Slot, torch.Tensor], None]) -> None:
        """Free the places that are left between slots: those of the emptiest slab go into free places elsewhere, and
        where these do not suffice into a new slab that is no larger than needed. `move(slot, memory)` copies one;
        nothing is moved where the device has no room for a new slab."""
        while self.loose:
            slab = min(self._slabs, key=lambda one: len(one.held))
            if len(slab.held) > self._free_elsewhere(slab):
                slab = min((one for one in self._slabs if one.free), key=lambda one: len(one.held))
                torch.cuda.empty_cache()  # or a part of a larger slab that was freed would become the new one
                try:
                    self._new(len(slab.held) - self._free_elsewhere(slab))
                except torch.OutOfMemoryError:
                    return
            others = [one for one in self._slabs if one is not slab and one.free]
            for at, slot in list(slab.held.items()):
                del slab.held[at]
                while not others[0].free:
                    others.pop(0)
                move(slot, self._put(slot, others[0]))
            self._slabs.remove(slab)

    def _free_elsewhere(self, slab: Slab) -> int:
        return sum(len(one.free) for one in self._slabs if one is not slab)

    @property
    def loose(self) -> bool:
        """Whether there are free places."""
        return self._places > len(self._of)

    @property
    def _places(self) -> int:
        return sum(len(slab.free) + len(slab.held) for slab in self._slabs)

    def _new(self, places: int) -> Slab:
        memory = torch.empty(places * self._stride, dtype=torch.uint8, device=self._device)
        self._slabs.append(Slab(memory, [*range(places - 1, -1, -1)]))
        return self._slabs[-1]

    def _put(self, slot: Slot, slab: Slab) -> torch.Tensor:
        at = slab.free.pop()
        slab.held[at] = slot
        self._of[slot.index] = slab, at
        return slab.memory[at * self._stride :][: self._bytes]
