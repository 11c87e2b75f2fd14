"""Serves experts from a pack on disk: read straight into slots, or through a host cache of a chosen size."""

import random
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple, Protocol

import torch

from core.memory.codec.layers import LayerCodecs
from core.memory.pack import PackReader
from core.memory.pages import aligned
from core.memory.store import ExpertStore
from core.types import Origin

LEFT = 4  # rows that are not lent: more than threads copy at a time
TRIED = 32 << 20  # bytes read to measure the speed of a disk


class PackStore(ExpertStore):
    """Shared base of both stores: a pack, and rows of host memory that hold one expert each."""

    def __init__(self, reader: PackReader, codecs: LayerCodecs, rows: int, pin: bool) -> None:
        super().__init__(codecs, rows, reader.row_bytes, pin)
        self._reader = reader

    def close(self) -> None:
        self._reader.close()
        super().close()


class DiskStore(PackStore):
    """A store without a host tier: every fetch reads from disk. Slots are in CPU memory.

    Where a slot's layout equals the blob's, the disk read targets the slot itself, which `Arena` allocated in whole
    pages; otherwise it goes through one of `rows` buffers, one per concurrently fetching thread.
    """

    def __init__(self, reader: PackReader, codecs: LayerCodecs, rows: int) -> None:
        super().__init__(reader, codecs, rows, False)
        self._free: SimpleQueue[torch.Tensor] = SimpleQueue()
        for row in self._rows:
            self._free.put(row)

    def origin(self, eid: int) -> Origin:
        return "disk"

    def host_resident(self) -> Sequence[int]:
        return ()

    def fetch(self, eid: int, slots: Sequence[torch.Tensor], first: int = 0) -> int:
        codec = self.codecs.of(eid)
        if codec.verbatim and codec.blocks == 1 and slots[0].numel() >= self._reader.padded_of(eid):
            return self._reader.read_into(eid, slots[0])
        row = self._free.get()
        try:
            read = self._reader.read_into(eid, row, range(first, first + len(slots)))
            self._memory.place(0, row, codec, slots, first)
        finally:
            self._free.put(row)
        return read


class Rows(Protocol):
    """Decides which experts have a row of host memory: `core.cache.host_rows.HostRows`. One thread at a time."""

    def use_policy(self, make_policy: Callable[[Any], Any], usual: Any) -> None: ...
    def begin_pass(self, now: int) -> None: ...
    def has(self, eid: int) -> bool: ...
    def held(self) -> Sequence[int]: ...
    def lease(self, eid: int) -> tuple[int, bool]: ...
    def release(self, eid: int) -> None: ...
    def evict(self, eid: int) -> None: ...


class HostCache(PackStore):
    """Keeps some experts in `count` rows of host memory; the others stay on disk.

    An expert enters on its way to the device; `rows` decides which one leaves for it. There must be more rows than copy
    threads.
    """

    def __init__(self, reader: PackReader, codecs: LayerCodecs, count: int, pin: bool, rows: Rows) -> None:
        super().__init__(reader, codecs, count, pin)
        self._lock = threading.Lock()  # of `rows`
        self._held = rows
        self._lent = 0  # rows that are borrowed
        self._placed: dict[int, Any] = {}  # row -> CUDA event after the last copy from it

    def use_policy(self, make_policy: Callable[[Any], Any], usual: Any) -> None:
        with self._lock:
            self._held.use_policy(make_policy, usual)

    def begin_pass(self, now: int) -> None:
        with self._lock:
            self._held.begin_pass(now)

    def origin(self, eid: int) -> Origin:
        with self._lock:
            return "host" if self._held.has(eid) else "disk"

    def host_resident(self) -> Sequence[int]:
        with self._lock:
            return self._held.held()

    def borrow(self, eid: int) -> torch.Tensor | None:
        with self._lock:
            if not self._held.has(eid) or self._lent >= len(self._rows) - LEFT:
                return None
            row, _ = self._held.lease(eid)
            self._lent += 1
        return self._rows[row]

    def give_back(self, eid: int) -> None:
        with self._lock:
            self._held.release(eid)
            self._lent -= 1

    @property
    def lends(self) -> bool:
        return len(self._rows) > LEFT

    def fetch(self, eid: int, slots: Sequence[torch.Tensor], first: int = 0) -> int:
        with self._lock:
            row, known = self._held.lease(eid)
        read = 0
        try:
            if not known:
                if (event := self._placed.pop(row, None)) is not None:
                    event.synchronize()
                read = self._reader.read_into(eid, self._rows[row])
            if self._memory.place(row, self._rows[row], self.codecs.of(eid), slots, first):
                self._placed[row] = event = torch.cuda.Event()
                event.record()
        except BaseException:
            with self._lock:  # the row does not hold the expert's bytes
                self._held.evict(eid)
            raise
        with self._lock:
            self._held.release(eid)
        return read


class Disk(NamedTuple):
    """How a pack is read: speed in GB/s, and whether reads bypass the system's file cache."""

    gbps: float
    direct: bool


_measured: dict[Path, Disk] = {}


def measure_disk(pack: Path) -> Disk:
    """Measure the read speed of a pack: single experts in random order; once per process.

    Uses the faster half of the reads, because the slower ones were disturbed by other activity on the machine.
    """
    if pack not in _measured:
        with PackReader(pack) as reader:
            total, buffer, byte_s = reader.manifest.total, aligned(reader.padded_bytes), list[float]()
            wanted = random.Random(0).sample(range(total), min(total, max(8, TRIED // reader.padded_bytes)))
            for eid in wanted:
                begin = time.perf_counter()
                size = reader.read_into(eid, buffer)
                byte_s.append((time.perf_counter() - begin) / size)
            usual_s = statistics.mean(sorted(byte_s)[: -(-len(byte_s) // 2)])
            _measured[pack] = Disk(1 / usual_s / 1e9, reader.direct)
    return _measured[pack]
