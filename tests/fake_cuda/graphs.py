"""CUDA graphs of the fake device: what is called within a capture is kept, and called again by a replay.

As on a real device, whoever captures may not wait for the device, nor have host memory pinned or copied from where it
is not pinned: the call fails, and so does the capture. What a capture computed is void: it is overwritten when the
capture ends, so that only a replay gives numbers. (In place, calls within a capture have their effect also here.)
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tests.fake_cuda.faults import Faults

NOT_PERMITTED = "CUDA error: operation not permitted when stream is capturing"
INVALID = "CUDA error: operation failed due to a previous error during capture"


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


class Captures:
    """Who captures."""

    def __init__(self, faults: Faults) -> None:
        self._local, self._faults = Local(), faults

    @property
    def current(self) -> FakeGraph | None:
        """What the calling thread captures."""
        return self._local.graph

    def forbid(self) -> None:
        """Raises RuntimeError where the calling thread captures."""
        if (graph := self.current) is not None:
            graph.valid = False
            raise RuntimeError(NOT_PERMITTED)

    def functions(self, synchronize: Callable[[], None]) -> dict[str, Any]:
        """What torch.cuda has, by name."""

        @contextmanager
        def graph(
            of: FakeGraph, pool: Any = None, stream: Any = None, capture_error_mode: str = "global"
        ) -> Iterator[None]:
            assert capture_error_mode == "thread_local", "copy threads would break the capture off"
            synchronize()
            self.forbid()
            self._local.graph = of
            try:
                yield
            finally:
                self._local.graph = None
                with torch._C.DisableTorchFunction():
                    for tensor in of.made:
                        tensor.fill_(float("nan") if tensor.is_floating_point() else 0)
                of.complete = True
                if not of.valid:
                    raise RuntimeError(INVALID)

        return {
            "CUDAGraph": lambda: FakeGraph(self._faults),
            "graph": graph,
            "graph_pool_handle": lambda: (0, 1),
            "is_current_stream_capturing": lambda: self.current is not None,
        }
