"""Experts in a pack on disk: read straight into slots, or through a host cache of a chosen size."""

from __future__ import annotations

import random
import statistics
import threading
import time
from collections import OrderedDict
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch

from core.memory.codec import Codec
from core.memory.pack import PackReader
from core.memory.pages import aligned
from core.memory.store import slabs
from core.types import Origin

TRIED = 32 << 20  # bytes read to see how fast a disk is


class PackStore:
    """What both have: a pack, and rows of host memory that hold an expert each."""

    def __init__(self, reader: PackReader, codec: Codec, rows: int, pin: bool) -> None:
        self._reader, self._codec = reader, codec
        self._rows = slabs(rows, reader.padded_bytes, pin)

    @property
    def blob_bytes(self) -> int:
        return self._codec.blob_bytes

    @property
    def bytes(self) -> int:
        return len(self._rows) * self._reader.padded_bytes

    def close(self) -> None:
        self._reader.close()
        self._rows.clear()

    def _place(self, row: torch.Tensor, slot: torch.Tensor) -> None:
        self._codec.place(row[: self.blob_bytes], slot)


class DiskStore(PackStore):
    """No host tier: every fetch reads. The slot is in the CPU's own memory.

    Where slots hold a blob's very bytes the disk writes into the slot itself, which `Arena` made of whole pages; else
    into one of `rows` buffers: as many as threads fetch at once.
    """

    def __init__(self, reader: PackReader, codec: Codec, rows: int) -> None:
        super().__init__(reader, codec, rows, False)
        self._free: SimpleQueue[torch.Tensor] = SimpleQueue()
        for row in self._rows:
            self._free.put(row)

    def origin(self, eid: int) -> Origin:
        return "disk"

    def fetch(self, eid: int, slot: torch.Tensor) -> int:
        if self._codec.verbatim and slot.numel() >= self._reader.padded_bytes:
            self._reader.read_into(eid, slot)
        else:
            row = self._free.get()
            try:
                self._reader.read_into(eid, row)
                self._place(row, slot)
            finally:
                self._free.put(row)
        return self._reader.padded_bytes


class HostCache(PackStore):
    """The experts fetched last, as many as `rows` hold, in host memory; the rest on disk.

    An expert enters on its way to the device and leaves when it is the one fetched longest ago. `rows` must be more
    than the copy threads there are.
    """

    def __init__(self, reader: PackReader, codec: Codec, rows: int, pin: bool) -> None:
        super().__init__(reader, codec, rows, pin)
        self._lock = threading.Lock()
        self._free = list(range(rows))
        self._row: OrderedDict[int, int] = OrderedDict()  # eid -> row, the one fetched last at the end
        self._busy: set[int] = set()  # eids being read or placed
        self._placed: dict[int, Any] = {}  # row -> CUDA event of the last copy out of it
        self._pin = pin

    def origin(self, eid: int) -> Origin:
        with self._lock:
            return "host" if eid in self._row else "disk"

    def fetch(self, eid: int, slot: torch.Tensor) -> int:
        with self._lock:
            row, known = self._take(eid)
        read = 0
        try:
            if not known:
                if (event := self._placed.pop(row, None)) is not None:
                    event.synchronize()
                self._reader.read_into(eid, self._rows[row])
                read = self._reader.padded_bytes
            self._place(self._rows[row], slot)
            if self._pin:
                self._placed[row] = event = torch.cuda.Event()
                event.record()
        except BaseException:
            with self._lock:  # what the row holds is not the expert
                self._free.append(self._row.pop(eid))
                self._busy.discard(eid)
            raise
        with self._lock:
            self._busy.discard(eid)
        return read

    def _take(self, eid: int) -> tuple[int, bool]:
        """Under the lock: the row for an expert, and whether it holds it already."""
        self._busy.add(eid)
        if eid in self._row:
            self._row.move_to_end(eid)
            return self._row[eid], True
        if not self._free:
            oldest = next(e for e in self._row if e not in self._busy)
            self._free.append(self._row.pop(oldest))
        self._row[eid] = row = self._free.pop()
        return row, False


class Disk(NamedTuple):
    """How a pack is read: GB/s, and whether past the system's file cache."""

    gbps: float
    direct: bool


_measured: dict[Path, Disk] = {}


def measure_disk(pack: Path) -> Disk:
    """How fast a pack's experts are read, one at a time in random order; measured once in a process.

    What is usual is told by the quicker half of the reads: the rest met whatever else the machine was doing.
    """
    if pack not in _measured:
        with PackReader(pack) as reader:
            total, buffer, seconds = reader.manifest.total, aligned(reader.padded_bytes), []
            wanted = random.Random(0).sample(range(total), min(total, max(8, TRIED // reader.padded_bytes)))
            for eid in wanted:
                begin = time.perf_counter()
                reader.read_into(eid, buffer)
                seconds.append(time.perf_counter() - begin)
            usual = statistics.mean(sorted(seconds)[: -(-len(seconds) // 2)])
            _measured[pack] = Disk(reader.padded_bytes / usual / 1e9, reader.direct)
    return _measured[pack]
