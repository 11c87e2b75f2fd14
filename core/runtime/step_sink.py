"""What the parts of a pass report to while it runs: a `core.runtime.recorder.Recorder`, or a `NullSink`."""

from collections.abc import Sequence
from typing import Protocol

from core.cache.expert_cache import ExpertCache
from core.cache.lease import LeasedSegment, SkippedRequest
from core.memory.transfer import TransferEngine
from core.runtime.batch import Batch

Requests = Sequence[LeasedSegment | SkippedRequest]


class StepSink(Protocol):
    """Takes the events of one pass at a time, on the computing thread."""

    stall_s: float
    """How long computing has waited for copies in the pass."""

    def begin(self, batch: Batch) -> None:
        """A pass begins: discards what was counted before it."""

    def layer(self, layer: int, ids: list[list[int]], requests: Requests | None) -> None:
        """A layer was computed: the router's choice [T][k], and the outcome of each distinct expert's request; None =
        all of them were hits."""

    def waited(self, seconds: float, *, late: bool) -> None:
        """Computing waited for a copy; `late`: for a prefetch that did not land in time."""

    def hosted(self, took_s: float, waited_s: float) -> None:
        """Threads of the host computed missing experts for so long, and the computing thread took part or waited for
        them."""

    def predicted(self, seconds: float) -> None:
        """Predicting, ranking and queueing took so long on the computing thread."""

    def forget(self) -> None:
        """Discard everything counted and copied so far."""


class NullSink:
    """For passes that their caller measures: keeps only how long the latest one waited for copies, and discards the
    counts of the cache and the link, which would otherwise be added to the next recorded pass."""

    def __init__(self, expert_cache: ExpertCache, transfers: TransferEngine) -> None:
        self._expert_cache, self._transfers = expert_cache, transfers
        self.stall_s = 0.0

    def begin(self, batch: Batch) -> None:
        self.forget()

    def layer(self, layer: int, ids: list[list[int]], requests: Requests | None) -> None:
        pass

    def waited(self, seconds: float, *, late: bool) -> None:
        self.stall_s += seconds

    def hosted(self, took_s: float, waited_s: float) -> None:
        pass

    def predicted(self, seconds: float) -> None:
        pass

    def forget(self) -> None:
        self.stall_s = 0.0
        self._expert_cache.take_counts()
        self._transfers.forget()
