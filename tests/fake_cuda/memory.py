"""Device and pinned memory as torch's allocators have them: what is allocated, what is reserved, when it runs out.

Device memory: c10/cuda/CUDACachingAllocator.cpp's sizes. Blocks of up to 1 MiB come from segments of 2 MiB, up to 10
MiB from segments of 20, larger ones from a segment of their own, rounded up to 2 MiB; freed blocks are kept for others.
A capture has segments of its own, kept while there are graphs over them; while it runs nothing is given back.
Pinned memory: torch's own is rounded up to a power of two and kept when freed; registered memory counts whole pages.
"""

import threading
from collections import Counter
from dataclasses import dataclass, field

import torch

from tests.fake_cuda.faults import Faults

MIB = 1 << 20
PoolId = tuple[int, int]
SHARED: PoolId = (0, 0)  # of what no graph captures
BROKEN = "captures_underway.empty() INTERNAL ASSERT FAILED, please report a bug to PyTorch."
PAGE = 4096
REFUSED, UNKNOWN = 2, 1  # cudaErrorMemoryAllocation, cudaErrorInvalidValue


def up(size: int, to: int) -> int:
    """`size` rounded up to a multiple of `to`."""
    return -(-size // to) * to


@dataclass(eq=False, slots=True)
class Block:
    """A part of a segment."""

    size: int
    free: bool = True


@dataclass(eq=False, slots=True)
class Segment:
    """Memory taken from the device at once."""

    size: int
    small: bool
    blocks: list[Block] = field(default_factory=list)
    pool: PoolId = SHARED

    @property
    def empty(self) -> bool:
        return len(self.blocks) == 1 and self.blocks[0].free


class DeviceMemory:
    """`total` bytes, of which others hold `taken`."""

    def __init__(self, total: int, taken: int = 0) -> None:
        self.total, self.taken = total, taken
        self._segments: list[Segment] = []
        self._lock = threading.RLock()
        self.allocated = self.reserved = self.most_allocated = self.most_reserved = 0
        self.full = False  # nothing more can be allocated
        self.captured: set[PoolId] = set()  # pools whose capture is taken to be running
        self._users: Counter[PoolId] = Counter()  # graphs, and captures that are running, by pool

    def begin_capture(self, pool: PoolId) -> None:
        """A capture begins."""
        self.captured.add(pool)
        self._users[pool] += 1

    def end_capture(self, _: int, pool: PoolId) -> None:
        """torch._C._cuda_endAllocateToPool."""
        if pool not in self.captured:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.captured.remove(pool)

    def release_pool(self, _: int, pool: PoolId) -> None:
        """torch._C._cuda_releasePool."""
        assert self._users[pool] > 0, "a pool is released twice"
        self._users[pool] -= 1

    def snapshot(self) -> list[dict[str, object]]:
        """torch.cuda.memory_snapshot."""
        with self._lock:
            used = [sum(block.size for block in one.blocks if not block.free) for one in self._segments]
            return [
                {"segment_pool_id": one.pool, "total_size": one.size, "allocated_size": size}
                for one, size in zip(self._segments, used, strict=True)
            ]

    def allocate(self, size: int, pool: PoolId = SHARED) -> tuple[Segment, Block]:
        """Raises torch.OutOfMemoryError, with nothing allocated."""
        if size == 0:
            return Segment(0, True), Block(0)
        if self.full:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size / MIB:.2f} MiB. GPU 0 is full.")
        size, small = up(size, 512), size <= MIB
        with self._lock:
            found = self._found(size, small, pool)
            if found is None:
                segment = self._segment(size, small, pool)
                found = segment, segment.blocks[0]
            segment, block = found
            left = block.size - size
            if left >= 512 if small else left > MIB:
                segment.blocks.insert(segment.blocks.index(block) + 1, Block(left))
                block.size = size
            block.free = False
            self.allocated += block.size
            self.most_allocated = max(self.most_allocated, self.allocated)
            return segment, block

    def free(self, segment: Segment, block: Block) -> None:
        """Keep a block for others."""
        with self._lock:
            block.free = True
            self.allocated -= block.size
            if not (blocks := segment.blocks):
                return  # of what has no bytes
            at = blocks.index(block)
            if blocks[at + 1 : at + 2] and blocks[at + 1].free:
                block.size += blocks.pop(at + 1).size
            if at and blocks[at - 1].free:
                blocks[at - 1].size += blocks.pop(at).size

    def empty_cache(self) -> None:
        """Give back every segment that nobody uses. Raises RuntimeError while a capture is taken to be running."""
        with self._lock:
            if self.captured:
                raise RuntimeError(BROKEN)
            for segment in [one for one in self._segments if one.empty and not self._users[one.pool]]:
                self._segments.remove(segment)
                self.reserved -= segment.size

    def reset_peak(self) -> None:
        self.most_allocated, self.most_reserved = self.allocated, self.reserved

    @property
    def available(self) -> int:
        """As cudaMemGetInfo says."""
        return self.total - self.taken - self.reserved

    def _found(self, size: int, small: bool, pool: PoolId) -> tuple[Segment, Block] | None:
        """The smallest free block that is large enough, of the oldest segment that has one."""
        best: tuple[Segment, Block] | None = None
        for segment in self._segments:
            if segment.small == small and segment.pool == pool:
                for block in segment.blocks:
                    if block.free and block.size >= size and (best is None or block.size < best[1].size):
                        best = segment, block
                        if block.size == size:
                            return best
        return best

    def _segment(self, size: int, small: bool, pool: PoolId) -> Segment:
        whole = 2 * MIB if small else 20 * MIB if size < 10 * MIB else up(size, 2 * MIB)
        if whole > self.available and not self.captured:
            self.empty_cache()
        if whole > self.available:
            raise torch.OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate {size / MIB:.2f} MiB. GPU 0 has a total capacity of "
                f"{self.total / MIB:.2f} MiB of which {self.available / MIB:.2f} MiB is free."
            )
        segment = Segment(whole, small, [Block(whole)], pool)
        self._segments.append(segment)
        self.reserved += whole
        self.most_reserved = max(self.most_reserved, self.reserved)
        return segment


class PinnedMemory:
    """Page-locked host memory, of which the system gives `limit` bytes."""

    def __init__(self, limit: int, faults: Faults) -> None:
        self.limit, self._faults = limit, faults
        self.registered: dict[int, int] = {}  # address -> bytes
        self._own: dict[int, int] = {}  # address -> bytes of torch's own, in use
        self._kept: Counter[int] = Counter()  # bytes -> blocks that torch keeps
        self._lock = threading.RLock()

    @property
    def used(self) -> int:
        """Bytes that the system has locked."""
        return sum(self.registered.values()) + sum(self._own.values()) + sum(n * size for size, n in self._kept.items())

    def allocate(self, address: int, size: int) -> None:
        """torch's pin_memory. Raises RuntimeError when the system refuses."""
        whole = 1 << max(size - 1, 1).bit_length()
        with self._lock:
            if self._kept[whole]:
                self._kept[whole] -= 1
            elif self.used + whole > self.limit:
                raise RuntimeError("CUDA error: out of memory")
            self._own[address] = whole

    def release(self, address: int) -> None:
        """torch keeps it."""
        with self._lock:
            self._kept[self._own.pop(address)] += 1

    def empty_cache(self) -> None:
        """torch._C._host_emptyCache."""
        with self._lock:
            self._kept.clear()

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        """0, or an error code, which CUDA remembers until somebody asks for the last error."""
        with self._lock:
            if self.used + up(size, PAGE) > self.limit:
                self._faults.remembered = "CUDA error: out of memory"
                return REFUSED
            self.registered[address] = up(size, PAGE)
            return 0

    def cudaHostUnregister(self, address: int) -> int:
        """0, or an error code."""
        with self._lock:
            return 0 if self.registered.pop(address, 0) else UNKNOWN

    def holds(self, address: int) -> bool:
        """Whether an address is in pinned memory."""
        with self._lock:
            both = (*self.registered.items(), *self._own.items())
            return any(start <= address < start + size for start, size in both)
