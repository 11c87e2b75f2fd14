"""The metrics of a pipeline whose passes are measured by its caller and not recorded."""

from __future__ import annotations

from collections.abc import Sequence

from core.cache.expert_cache import ExpertCache
from core.cache.lease import LeasedSegment, SkippedRequest
from core.memory.transfer import TransferEngine
from core.runtime.batch import Batch


class Unrecorded:
    """Takes the place of a `core.runtime.recorder.Recorder`: keeps only how long the latest pass waited for copies, and
    drops the counts of the cache and the link, which would otherwise be added to the next recorded pass."""

    def __init__(self, expert_cache: ExpertCache, transfers: TransferEngine) -> None:
        self._expert_cache, self._transfers = expert_cache, transfers
        self.stall_s = 0.0

    def begin(self, batch: Batch) -> None:
        """A pass begins: drops what was counted before."""
        self.forget()

    def forget(self) -> None:
        """Drop what was counted."""
        self.stall_s = 0.0
        self._expert_cache.take_counts()
        self._transfers.forget()

    def layer(
        self, layer: int, ids: list[list[int]], requests: Sequence[LeasedSegment | SkippedRequest] | None
    ) -> None:
        """A layer was computed."""

    def waited(self, seconds: float, *, late: bool) -> None:
        """Computing waited for a copy."""
        self.stall_s += seconds
