"""Device memory by use, against the budget: the same sum for the dashboard, the records and the budget check."""

from collections.abc import Callable
from typing import Protocol

import torch

from core.capacity.free_memory import free_bytes
from core.capacity.sizes import Sizes
from core.memory.arena import Arena
from core.settings.config import Settings
from core.types import Memory

EVERY = 16  # decoded tokens between two questions to torch's allocator, each of which takes tens of microseconds


def _most_reserved(device: torch.device) -> int:
    """torch.cuda.max_memory_reserved, without sorting all of the allocator's counters by name first."""
    reserved = torch.cuda.memory_stats_as_nested_dict(device).get("reserved_bytes")
    return int(reserved["all"]["peak"]) if reserved else 0


class HasBytes(Protocol):
    """Device memory of some use."""

    @property
    def bytes(self) -> int:
        """Allocated now."""


class Ledger:
    """Adds up dense weights, slots, KV cache and workspace. `kept_bytes`: host memory of KV caches that
    wait there. May be read from any thread."""

    def __init__(
        self,
        sizes: Sizes,
        arena: Arena,
        kv: HasBytes,
        device: torch.device,
        settings: Settings,
        kept_bytes: Callable[[], int] = lambda: 0,
    ) -> None:
        self._planned, self._arena, self._kv, self._device = sizes, arena, kv, device
        self._cuda = device.type == "cuda"
        self._kept_bytes = kept_bytes
        self._peak, self._exceeded = 0, False
        self.borrowed = 0  # bytes of workspace that slots made room for
        self.hold_to(settings)
        self._due = False

    def hold_to(self, settings: Settings) -> None:
        """Sets the budget that must not be exceeded from now on."""
        self._sizes = self._planned.under(settings)
        self.budget_bytes = self._sizes.budget_bytes(settings.cache.budget)
        self._reserved = 0
        self._unread = 0  # passes since torch's peak was read, which is over all of them
        self._due = True

    def begin(self) -> None:
        """A forward pass begins. On CUDA, what earlier passes left reserved beyond the budget is given back first, and
        torch's peak is reset if it has been read."""
        if self._cuda and not self._unread:
            if self._exceeded:
                torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self._device)

    def passed(self, *, decoded: bool) -> int:
        """A forward pass is over, `decoded` = of one token a sequence -> `used`. torch's peak is read after
        one of EVERY decoding passes."""
        if not self._cuda:
            return self._noted()
        self._unread += 1
        if decoded and self._unread < EVERY and not self._due:
            return self._noted()
        self._unread, self._due = 0, False
        return self.used()

    def used(self) -> int:
        """Device bytes in use, with the workspace as reserved; on CUDA, the most that torch has reserved in the passes
        since the last reading, if that is more: it includes what its allocator keeps, and what products need."""
        if self._cuda:
            self._reserved = _most_reserved(self._device)
        return self._noted()

    def _noted(self) -> int:
        """`used`, with torch's peak as last read."""
        used = self._sizes.dense + self._arena.bytes + self._kv.bytes + self._sizes.workspace + self.borrowed
        if self._cuda:
            used = max(used, self._reserved)
            self._exceeded = used > self.budget_bytes
        self._peak = max(self._peak, used)
        return used

    def memory(self, host_bytes: int, unpinned_bytes: int = 0) -> Memory:
        """Everything that the memory bar shows."""
        used, kv, experts, dense = self.used(), self._kv.bytes, self._arena.bytes, self._sizes.dense
        free, total = free_bytes(self._device)
        return Memory(
            dense=dense,
            experts=experts,
            kv=kv,
            kv_reserved=self._sizes.kv,
            workspace=used - dense - experts - kv,
            budget=self.budget_bytes,
            device_total=total,
            device_free=free,
            host=host_bytes,
            peak=self._peak,
            kept=self._kept_bytes(),
            unpinned=unpinned_bytes,
        )
