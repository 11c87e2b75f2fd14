"""Rows of host memory for experts, pinned for a GPU as far as the system allows.

A GPU copies from pinned memory by itself, at the link's speed; other memory has to pass through a pinned row first. How
much can be pinned shows only when the system refuses, as some do after a gigabyte and others at half of the memory.
Each slab is therefore pinned for itself, at its exact size, and those after a refusal are left as they are.
"""

import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

import torch

from core.memory.codec import Codec
from core.memory.mapped import device_address
from core.memory.pages import aligned

SLAB_BYTES = 256 << 20  # rows are allocated together
PINNED_SLAB_BYTES = 64 << 20  # ... and pinned together: so much at most is left unpinned below a system's limit
STAGING = 6  # pinned rows that others pass through: more than copies are in flight


class HostMemory:
    """`rows` [row_bytes] uint8, of which the first `pinned` are pinned. `close` gives it back."""

    def __init__(self, count: int, row_bytes: int, pin: bool = False, sizes: Sequence[int] = ()) -> None:
        """`pin`: for copies to a GPU. `sizes`: of each row, where these differ; `row_bytes` is the largest."""
        self.row_bytes, self.pinned, self._pin = row_bytes, 0, pin
        self._sizes = [*sizes] if sizes else [row_bytes] * count
        self.rows: list[torch.Tensor] = []
        self._locked: list[torch.Tensor] = []  # slabs that are pinned, and what passes the others on
        self._slab_rows: list[int] = []  # of each slab
        self._release = weakref.finalize(self, _unlock, self._locked)
        self._release.atexit = False
        self._staging: SimpleQueue[tuple[torch.Tensor, Any]] | None = None
        self._direct = count  # rows from here on pass through the staging rows
        if pin and count:
            self._pinned(count)
        else:
            for own in self._slabs(SLAB_BYTES):
                self._add(aligned(sum(own)), own)

    @property
    def bytes(self) -> int:
        """Of all rows."""
        return sum(map(len, self.rows))

    @property
    def unpinned_bytes(self) -> int:
        """Of the rows that were to be pinned and are not."""
        return sum(map(len, self.rows[self.pinned :])) if self._pin else 0

    def device_addresses(self) -> list[int]:
        """Where kernels read the pinned rows, in order. Raises DeviceError where they cannot."""
        torch.cuda.synchronize()  # makes the context current on this thread, as the driver requires
        slabs = self._locked[1:] if self._staging is not None else self._locked
        found = list[int]()
        for slab, count in zip(slabs, self._slab_rows, strict=False):
            offset = device_address(slab) - slab.data_ptr()
            found += [row.data_ptr() + offset for row in self.rows[len(found) : len(found) + count]]
        return found

    def place(self, at: int, blob: torch.Tensor, codec: Codec, slots: Sequence[torch.Tensor], first: int = 0) -> bool:
        """Write blocks of a blob, from `first` on, into slots; on CUDA in the current stream. The blob is what row `at`
        begins with. Returns whether the row is still read when this returns."""
        if at < self._direct:
            _place(blob, codec, slots, first)
            return at < self.pinned
        assert self._staging is not None
        staged, passed = self._staging.get()
        try:
            if passed is not None:
                passed.synchronize()  # its last copy may still read it
            used = slice(first * codec.block_bytes, (first + len(slots)) * codec.block_bytes)
            staged[used].copy_(blob[used])
            _place(staged, codec, slots, first)
            passed = torch.cuda.Event()
            passed.record()
        finally:  # also after an error, or the next caller would wait forever; that copy's slot is given up
            self._staging.put((staged, passed))
        return False

    def close(self) -> None:
        """Give everything back. No copy may be running."""
        self.rows.clear()
        self._staging = None
        self._release()

    def _pinned(self, count: int) -> None:
        """Pin slab after slab until the system refuses."""
        staging = aligned(min(STAGING, count) * self.row_bytes)
        pinning = staged = _lock(staging, self._locked)
        for own in self._slabs(PINNED_SLAB_BYTES):
            slab = aligned(sum(own))
            if pinning and not _lock(slab, self._locked):
                pinning = False
                self._leave_room()
            self.pinned += len(own) if pinning else 0
            self._add(slab, own)
        if pinning:
            _unlock([self._locked.pop(0)])  # nothing has to pass through it
        elif staged:
            self._direct, self._staging = self.pinned, SimpleQueue()
            for row in staging.view(-1, self.row_bytes):
                self._staging.put((row, None))

    def _leave_room(self) -> None:
        """Unpin the last slab: what torch pins for itself needs room, too."""
        if self.pinned:
            _unlock([self._locked.pop()])
            self.pinned -= self._slab_rows[-1]

    def _slabs(self, most: int) -> Iterator[list[int]]:
        """The bytes of each row of a slab, of which there is at least one, and all together take at most that many."""
        own, taken = list[int](), 0
        for size in self._sizes:
            if own and taken + size > most:
                yield own
                own, taken = [], 0
            own.append(size)
            taken += size
        if own:
            yield own

    def _add(self, slab: torch.Tensor, sizes: list[int]) -> None:
        self.rows.extend(slab.split(sizes))
        self._slab_rows.append(len(sizes))


def _place(blob: torch.Tensor, codec: Codec, slots: Sequence[torch.Tensor], first: int) -> None:
    for at, slot in enumerate(slots, first):
        codec.place(blob[at * codec.block_bytes :] if at else blob, slot)


def _lock(slab: torch.Tensor, locked: list[torch.Tensor]) -> bool:
    """Pin a slab, and add it to those that are; False when the system refuses."""
    if int(torch.cuda.cudart().cudaHostRegister(slab.data_ptr(), slab.numel(), 0)) == 0:
        locked.append(slab)
        return True
    with suppress(RuntimeError):  # CUDA remembers the refusal, and the next kernel to start would report it
        torch.zeros(1, device="cuda")
    return False


def _unlock(locked: list[torch.Tensor]) -> None:
    if locked:
        with suppress(RuntimeError):  # of a device that is lost
            torch.cuda.synchronize()
    while locked:
        torch.cuda.cudart().cudaHostUnregister(locked.pop().data_ptr())
