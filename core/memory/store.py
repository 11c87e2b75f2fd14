"""Host copies of all experts, encoded once at load, in a few large slabs (pinned when the device is a GPU)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import torch

from core.memory.codec import Codec

SLAB_BYTES = 256 << 20  # a power of two: pinning rounds every allocation up to one


class Cancelled(Exception):
    """The user stopped a long job; whatever was built so far is dropped."""


class HostStore:
    """`blob(eid)` is one expert's encoded bytes [blob_bytes] uint8; immutable after `fill`."""

    def __init__(self, codec: Codec, count: int, pin: bool) -> None:
        self._codec = codec
        per_slab = max(1, SLAB_BYTES // codec.blob_bytes)
        sizes = [min(per_slab, count - start) for start in range(0, count, per_slab)]
        self._slabs = [torch.empty(n, codec.blob_bytes, dtype=torch.uint8, pin_memory=pin) for n in sizes]
        self._blobs = [slab[i] for slab in self._slabs for i in range(slab.shape[0])]

    def fill(self, experts: Iterator[dict[str, torch.Tensor]], progress: Callable[[float], None],
             cancel: threading.Event | None) -> None:
        """Encode every expert in eid order, one at a time. Raises Cancelled when `cancel` is set."""
        for eid, parts in enumerate(experts):
            if cancel is not None and cancel.is_set():
                raise Cancelled
            self._blobs[eid].copy_(self._codec.encode(parts))
            progress((eid + 1) / len(self._blobs))

    def blob(self, eid: int) -> torch.Tensor:
        return self._blobs[eid]

    @property
    def bytes(self) -> int:
        """Host bytes held."""
        return sum(slab.numel() for slab in self._slabs)
