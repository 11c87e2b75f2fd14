"""The device memory of CUDA graphs, which is given back with them, and after a capture that failed.

torch allocates for a capture from a pool of its own, and keeps that for as long as there are graphs over it. Where a
capture ends with an error, releases of torch differ in what they undo (pytorch pull requests 180395 and 190308): one
that undoes nothing takes the capture to be still running, so that its allocator gives back no memory any more and fails
in the next request that needs some, it keeps the pool for good, and leaves the thread in the capture's stream. Here
all of it is undone, whatever torch did of it.
"""

import gc
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import torch

from core.system.wording import format_bytes

ROOM = 64 << 20
"""Bytes that must be free for graphs. The library of products takes workspace of its own for the stream that captures
(32 MiB on an H100, 8 MiB before), a token's states are a few MiB, and the allocator's segments of 2 and 20 MiB are
filled in part."""

Result = TypeVar("Result")


class GraphPool:
    """Captures graphs over memory that they share. On one thread, like the graphs."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._id: Any = None  # (int, int), as torch names it
        self.bytes = 0  # taken by captures so far
        self.failed = False  # a capture did, since memory was last given back

    def lack(self) -> str:
        """Why a capture might find no memory; "" where there is room."""
        torch.cuda.empty_cache()
        free, needed = int(torch.cuda.mem_get_info(self._device)[0]), ROOM - self.bytes
        return "" if free >= needed else f"it needs {format_bytes(needed)} of free memory, and {format_bytes(free)} are"

    def capture(self, call: Callable[[], Result]) -> tuple[Any, Result]:
        """What `call` launches as a graph, and its result, which only replays fill. Raises the errors of the call, and
        those of torch; `give_back` is to follow, once the error and all graphs are gone."""
        self._id = self._id or torch.cuda.graph_pool_handle()
        graph, before = torch.cuda.CUDAGraph(), torch.cuda.memory_reserved(self._device)
        self.failed = True
        with (
            torch.cuda.stream(torch.cuda.current_stream(self._device)),  # which is the current one again afterwards
            torch.cuda.graph(graph, pool=self._id, capture_error_mode="thread_local"),
        ):
            result = call()
        self.failed = False
        self.bytes += max(0, torch.cuda.memory_reserved(self._device) - before)
        return graph, result

    def give_back(self) -> None:
        """Return the memory to the device. All graphs over it are gone."""
        if self._id is None:
            return
        torch._C._cuda_clearCublasWorkspaces()  # there may be one in the pool
        if self.failed:
            self._end_capture(self._id)
        torch.cuda.empty_cache()
        self._id, self.bytes, self.failed = None, 0, False

    def _end_capture(self, pool: Any) -> None:
        """Undo what torch has left of a capture that failed."""
        gc.collect()  # what the frames of the pass held
        at = torch.cuda.current_device() if self._device.index is None else self._device.index
        with suppress(RuntimeError):  # it is over, as it should be
            torch._C._cuda_endAllocateToPool(at, pool)
        torch.cuda.empty_cache()
        kept = [one for one in torch.cuda.memory_snapshot() if tuple(one["segment_pool_id"]) == pool]
        if kept and not any(one["allocated_size"] for one in kept):
            torch._C._cuda_releasePool(at, pool)
