"""Where a layer's experts are computed: on the device, from the slots that their blocks were copied into."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from core.cache.lease import LeasedSegment
from core.memory.transfer import TransferEngine
from core.runtime.expert_rows import Rows
from core.types import Outcome


class WaitMetrics(Protocol):
    """What waiting reports: to `core.runtime.recorder.Recorder`, or to `core.runtime.unrecorded.Unrecorded`."""

    def waited(self, seconds: float, *, late: bool) -> None:
        """Computing waited for a copy; `late`: for a prefetch that did not land in time."""


class DeviceProcessor:
    """Computes leased segments, each as soon as its copy has landed."""

    def __init__(self, transfers: TransferEngine, metrics: WaitMetrics) -> None:
        self.transfers, self._metrics = transfers, metrics

    def compute(
        self, segments: Sequence[LeasedSegment], rows: Rows, meanwhile: Callable[[], None] | None = None
    ) -> None:
        """Give `rows` what all `segments` make of their states: resident ones at once, then the missing ones.
        `meanwhile` is called in between."""
        for some in rows.batches(segments):
            if meanwhile is not None and some[0].ticket is not None:
                meanwhile()
                meanwhile = None
            for leased in some:
                if leased.ticket is not None:
                    seconds = self.transfers.wait(leased.ticket)
                    self._metrics.waited(seconds, late=leased.outcome == Outcome.PARTIAL_HIT)
            rows.compute(some)
        if meanwhile is not None:
            meanwhile()

    def fence(self) -> Any:
        """What marks the end of everything computed so far: a CUDA event, None on a CPU."""
        return self.transfers.fence()
