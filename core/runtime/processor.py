"""Where a layer's experts are computed: on the device, from the slots that their blocks were copied into."""

from __future__ import annotations

from collections.abc import Sequence
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
    """Computes leased segments: resident ones at once, and missing ones as they land."""

    def __init__(self, transfers: TransferEngine, metrics: WaitMetrics) -> None:
        self.transfers, self._metrics = transfers, metrics

    def compute(self, segments: Sequence[LeasedSegment], rows: Rows) -> None:
        """Give `rows` what all `segments` make of their states."""
        for some in rows.batches([one for one in segments if one.ticket is None]):
            rows.compute(some)
        late = [one for one in segments if one.ticket is not None]
        while late:
            if self.transfers.waits_on_device:
                some, late = late, []
            else:
                some, late = self._landed(late)
            for batch in rows.batches(some):
                if self.transfers.waits_on_device:
                    for one in batch:
                        self._wait(one)
                rows.compute(batch)

    def _landed(self, late: Sequence[LeasedSegment]) -> tuple[list[LeasedSegment], list[LeasedSegment]]:
        """Wait for the first -> it and those that have landed by then, and the others."""
        self._wait(late[0])
        there, others = [late[0]], list[LeasedSegment]()
        for one in late[1:]:
            (there if one.ticket is not None and self.transfers.landed(one.ticket) else others).append(one)
        return there, others

    def _wait(self, leased: LeasedSegment) -> None:
        assert leased.ticket is not None
        seconds = self.transfers.wait(leased.ticket)
        self._metrics.waited(seconds, late=leased.outcome == Outcome.PARTIAL_HIT)

    def fence(self) -> Any:
        """What marks the end of everything computed so far: a CUDA event, None on a CPU."""
        return self.transfers.fence()
