"""Where experts are fetched from on a miss: host memory, disk through a host cache, or disk alone.

Several copy threads call a store at once, each for a different expert.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from core.memory.codec.layers import LayerCodecs
from core.memory.host_memory import HostMemory
from core.types import Origin


class Cancelled(Exception):
    """The user stopped a long job; its partial result is dropped."""


class ExpertStore:
    """All experts of one model, by eid, and the rows of host memory in which it holds some, all or none of them."""

    def __init__(self, codecs: LayerCodecs, rows: int, row_bytes: int, pin: bool, sizes: Sequence[int] = ()) -> None:
        """`sizes`: bytes of each row, where these differ."""
        self.codecs = codecs
        self._memory = HostMemory(rows, row_bytes, pin, sizes)
        self._rows = self._memory.rows

    @property
    def bytes(self) -> int:
        """Host bytes in use."""
        return self._memory.bytes

    @property
    def unpinned_bytes(self) -> int:
        """How much of that the system did not let be pinned for a GPU; 0 without one."""
        return self._memory.unpinned_bytes

    def bytes_of(self, eid: int) -> int:
        """Bytes copied to fetch an expert."""
        return self.codecs.of(eid).blob_bytes

    @property
    def blob_bytes(self) -> int:
        """The same, on average over layers."""
        return self.codecs.mean_blob_bytes

    def use_policy(self, make_policy: Callable[[Any], Any], usual: Any) -> None:
        """A policy decides from now on which expert leaves host memory for another; nothing where none ever does.
        `usual` [experts of the model] = how often a profile saw each, 0 without one."""

    def begin_pass(self, now: int) -> None:
        """Forward pass number `now` begins, which is the time of that policy."""

    def origin(self, eid: int) -> Origin:
        """Where a fetch would find the expert now."""
        raise NotImplementedError

    def host_resident(self) -> Sequence[int] | None:
        """The experts whose `origin` is host memory; None = all."""
        raise NotImplementedError

    def is_pinned(self, eid: int) -> bool:
        """Whether a fetch to a GPU waits for nothing, as the expert is in pinned memory to stay."""
        return False

    def device_addresses(self) -> Sequence[int]:
        """Where a GPU's kernels read each expert's blob, by eid: none where not all of them are in pinned memory to
        stay. Raises DeviceError where kernels cannot read that."""
        return ()

    def borrow(self, eid: int) -> torch.Tensor | None:
        """The blob of an expert in host memory (uint8 [>= its bytes]), where it stays until `give_back`; None where it
        is not there, or no more can be kept there."""
        return None

    def give_back(self, eid: int) -> None:
        """What was borrowed is not read any more."""

    @property
    def lends(self) -> bool:
        """Whether experts can ever be borrowed."""
        return False

    @property
    def lends_all(self) -> bool:
        """Whether every expert can be borrowed at any time."""
        return False

    def fetch(self, eid: int, slots: Sequence[torch.Tensor], first: int = 0) -> int:
        """Write blocks of an expert, from `first` on, into slots (uint8 [>= its slot_bytes] each); returns the bytes
        read from disk for them.

        On CUDA the write is asynchronous on the current stream. Raises ModelError when the disk read fails.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Release files and memory. No fetch may be running."""
        self._memory.close()


class HostStore(ExpertStore):
    """All experts in host memory, encoded once at load; immutable after `fill`."""

    def __init__(self, codecs: LayerCodecs, count: int, pin: bool) -> None:
        super().__init__(codecs, count, codecs.blob_bytes, pin, [codecs.of(eid).blob_bytes for eid in range(count)])

    def fill(
        self,
        experts: Iterator[dict[str, torch.Tensor]],
        progress: Callable[[float], None],
        cancel: threading.Event | None,
    ) -> None:
        """Encode every expert in eid order, one at a time. Raises Cancelled when `cancel` is set."""
        blobs = (self.codecs.of(eid).encode(parts) for eid, parts in enumerate(experts))
        self._fill(blobs, progress, cancel)

    def fill_raw(
        self, blobs: Iterator[torch.Tensor], progress: Callable[[float], None], cancel: threading.Event | None
    ) -> None:
        """Copy encoded experts (uint8 [>= their bytes]) in eid order. Raises Cancelled when `cancel` is set."""
        self._fill((blob[: self.bytes_of(eid)] for eid, blob in enumerate(blobs)), progress, cancel)

    def _fill(
        self, blobs: Iterator[torch.Tensor], progress: Callable[[float], None], cancel: threading.Event | None
    ) -> None:
        for eid, blob in enumerate(blobs):
            if cancel is not None and cancel.is_set():
                raise Cancelled
            self._rows[eid].copy_(blob)
            progress((eid + 1) / len(self._rows))

    def origin(self, eid: int) -> Origin:
        return "host"

    def host_resident(self) -> None:
        """All of them."""

    def is_pinned(self, eid: int) -> bool:
        return eid < self._memory.pinned

    def borrow(self, eid: int) -> torch.Tensor:
        return self._rows[eid]

    @property
    def lends(self) -> bool:
        return True

    @property
    def lends_all(self) -> bool:
        return True

    def device_addresses(self) -> Sequence[int]:
        return self._memory.device_addresses() if self._memory.pinned == len(self._rows) else ()

    def fetch(self, eid: int, slots: Sequence[torch.Tensor], first: int = 0) -> int:
        self._memory.place(eid, self._rows[eid], self.codecs.of(eid), slots, first)
        return 0
