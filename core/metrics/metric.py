"""What a figure of a forward pass is described by, and what a request for an expert can come to."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Literal

Reduction = Literal["sum", "mean", "max", "last", "all", "any"]


class Outcome(IntEnum):
    """The outcome of one request (one distinct expert of a layer in a step)."""

    HIT = 0  # resident and ready when routing was known
    PREFETCH_HIT = 1  # the same, copied by a prefetch and not used before
    PARTIAL_HIT = 2  # its copy had started: compute waited for the rest of it
    MISS = 3  # neither, or only queued: fetched on demand from host memory, or computed there
    MISS_DISK = 4  # the same, but not in host memory either: read from disk
    SUBSTITUTED = 5  # missing and not fetched: other experts were computed instead
    DROPPED = 6  # missing and not fetched: skipped
    PREDICTED = 7  # missing and not fetched: the layer used the predicted routing, which did not contain it


@dataclass(frozen=True, slots=True)
class Metric:
    """One figure of a forward pass."""

    name: str
    unit: str  # "" = a yes or no
    kind: type  # int, float or bool
    help: str  # its description in exports and docs
    reduce: Reduction | tuple[str, str] | None = None  # over an answer's passes, see `reduced`; None: not in it
    frame: bool = False  # whether the live frames have a timeline of it
    label: str = ""  # under which the live timelines name it in their tooltip; "": a panel draws it by itself
    column: str = ""  # its name in exports; "": its own
    level: bool = False  # its last value says something, and its sum nothing
    outcomes: tuple[Outcome, ...] = ()  # not counted by itself: the requests with one of these outcomes

    @property
    def array(self) -> str:
        """The dtype of its timeline in a frame; bytes are float32, which holds more than int32."""
        return "float32" if self.kind is float or self.unit == "bytes" else "uint8" if self.kind is bool else "int32"


def metric(unit: str, help: str, **more: Any) -> dict[str, Metric]:
    """The metadata of a field that is a metric; `more` as in Metric."""
    return {"metric": Metric("", unit, float, help, **more)}
