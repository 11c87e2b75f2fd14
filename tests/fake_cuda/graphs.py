"""CUDA graphs of the fake device: what is called within a capture is kept, and called again by a replay.

As on a real device, whoever captures may not wait for the device, nor have host memory pinned or copied from where it
is not pinned: the call fails, and so does the capture. What a capture computed is void: it is overwritten when the
capture ends, so that only a replay gives numbers. (In place, calls within a capture have their effect also here.)
"""

import itertools
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import Any

import torch

from tests.fake_cuda.faults import Faults
from tests.fake_cuda.memory import SHARED, DeviceMemory, PoolId

NOT_PERMITTED = "CUDA error: operation not permitted when stream is capturing"
INVALID = "CUDA error: operation failed due to a previous error during capture"


class Undoes(IntEnum):
    """What torch does where ending a capture fails."""

    NOTHING = 0  # the capture is taken to be running
    ITS_END = 1  # since pull request 180395; its memory is kept for good
    ALL = 2  # since 190308


class FakeGraph:
    """torch.cuda.CUDAGraph."""

    def __init__(self, faults: Faults) -> None:
        self._faults = faults
        self.calls: list[Callable[[], None]] = []
        self.made: list[torch.Tensor] = []  # by the calls
        self.valid, self.complete = True, False

    def replay(self) -> None:
        self._faults.check("graph.replay")
        if not (self.valid and self.complete):
            raise RuntimeError("Called CUDAGraph::replay without a preceding successful capture.")
        for call in self.calls:
            call()


class Local(threading.local):
    """Of a thread: what it captures."""

    graph: FakeGraph | None = None
    pool: PoolId = SHARED


class Captures:
    """Who captures."""

    def __init__(self, faults: Faults, memory: DeviceMemory) -> None:
        self._local, self._faults, self._memory = Local(), faults, memory
        self._pools = itertools.count(1)
        self.undoes = Undoes.NOTHING

    @property
    def current(self) -> FakeGraph | None:
        """What the calling thread captures."""
        return self._local.graph

    @property
    def pool(self) -> PoolId:
        """What the calling thread allocates from."""
        return self._local.pool

    def forbid(self) -> None:
        """Raises RuntimeError where the calling thread captures."""
        if (graph := self.current) is not None:
            graph.valid = False
            raise RuntimeError(NOT_PERMITTED)

    def _end(self, graph: FakeGraph, pool: PoolId) -> None:
        memory = self._memory
        self._local.graph, self._local.pool = None, SHARED
        with torch._C.DisableTorchFunction():
            for tensor in graph.made:
                tensor.fill_(float("nan") if tensor.is_floating_point() else 0)
        graph.complete = graph.valid
        if graph.valid or self.undoes:
            memory.end_capture(0, pool)
        if graph.valid or self.undoes is Undoes.ALL:
            weakref.finalize(graph, memory.release_pool, 0, pool)

    def functions(self, synchronize: Callable[[], None], stay: Callable[[], None]) -> dict[str, Any]:
        """What torch.cuda has, by name. After `stay` the current stream is that of captures."""

        @contextmanager
        def graph(of: FakeGraph, pool: PoolId | None = None, capture_error_mode: str = "global") -> Iterator[None]:
            assert capture_error_mode == "thread_local", "copy threads would break the capture off"
            pool = pool or (0, next(self._pools))
            synchronize()
            self._memory.empty_cache()
            self.forbid()
            self._memory.begin_capture(pool)
            self._local.graph, self._local.pool = of, pool
            try:
                yield
            finally:
                self._end(of, pool)
                if not of.valid:
                    stay()
                    raise RuntimeError(INVALID)

        return {
            "CUDAGraph": lambda: FakeGraph(self._faults),
            "graph": graph,
            "graph_pool_handle": lambda: (0, next(self._pools)),
            "is_current_stream_capturing": lambda: self.current is not None,
        }
