"""Builds the StepRecord of each forward pass from what was measured; makes no device queries of its own."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from core.cache.expert_cache import ExpertCache
from core.cache.lease import LeasedSegment, SkippedRequest
from core.cache.prefetch_cost import PrefetchCost
from core.memory.transfer import Ticket, TransferEngine
from core.policy.prefetch.throttle import PrefetchThrottle
from core.prediction.predictor_host import PredictorHost
from core.runtime.batch import Batch
from core.runtime.miss import MissPolicy
from core.runtime.trace_capture import TraceCapture
from core.settings.telemetry import TelemetrySettings
from core.types import ModelShape, Phase, StepRecord, Transfer

LATER: Any = dict.fromkeys(("ids", "layer", "expert", "outcome", "transfers"))  # fields built when first read


class Recorded(StepRecord):
    """A StepRecord that builds its arrays when they are first read, on the reading thread, to keep that work out of the
    pass. Two threads that read at once build equal arrays. `later` = one builder function per field."""

    __slots__ = ("_later",)

    def __init__(self, later: dict[str, Callable[[], Any]], **values: Any) -> None:
        super().__init__(**LATER, **values)
        for name in LATER:
            delattr(self, name)
        self._later = later

    def __getattr__(self, name: str) -> Any:
        """Called only for attributes that are not (yet) set."""
        build = self._later.get(name) if name in LATER else None
        if build is not None:
            setattr(self, name, build())
            self._later.pop(name, None)  # popped last: a thread that finds no builder finds the field
        return object.__getattribute__(self, name)


class Recorder:
    """Records one pass at a time: `begin`, `layer` once per MoE layer, `end`. `born_s` is the zero of the session's
    clock. Records contain what `miss` changed and what `capture` captured; `throttle` judges by them. What a pass
    stalled says how long one may wait for the predictor of `predictor_host`."""

    def __init__(
        self,
        shape: ModelShape,
        expert_cache: ExpertCache,
        transfers: TransferEngine,
        miss: MissPolicy | None = None,
        capture: TraceCapture | None = None,
        throttle: PrefetchThrottle | None = None,
        predictor_host: PredictorHost | None = None,
    ) -> None:
        self._shape, self._expert_cache, self._transfers = shape, expert_cache, transfers
        self._miss, self._capture, self._throttle = miss, capture, throttle
        self._predictor_host = predictor_host
        self.born_s = time.perf_counter()
        self.enabled = True
        self._index = 0
        self._batch: Batch | None = None
        self._ids: list[list[list[int]]] = []
        self._requests: list[tuple[int, Sequence[LeasedSegment | SkippedRequest]]] = []
        self.stall_s = 0.0
        self._prefetch_cost = PrefetchCost()

    def begin(self, batch: Batch) -> None:
        """Start a pass: clears what was recorded of the one before."""
        self._clear()
        self._batch = batch
        if self._miss is not None:
            self._miss.begin(batch.phase)
        if self._capture is not None:
            self._capture.begin(batch)

    def _clear(self) -> None:
        self._ids.clear()
        self._requests.clear()
        self.stall_s = 0.0
        self._prefetch_cost.begin()
        if self._miss is not None:
            self._miss.forget()

    def layer(self, layer: int, ids: list[list[int]], requests: Sequence[LeasedSegment | SkippedRequest]) -> None:
        """Record one computed MoE layer: the router's choice [T][k] and the outcome of each distinct expert's
        request."""
        if self.enabled:
            self._ids.append(ids)
            self._requests.append((layer, requests))

    def waited(self, seconds: float, *, late: bool) -> None:
        """Add a wait for a copy; `late`: for a prefetch that did not land in time."""
        self.stall_s += seconds
        if late:
            self._prefetch_cost.late_s += seconds

    def predicted(self, seconds: float) -> None:
        """Add time that the predictor took on the compute thread."""
        self._prefetch_cost.predict_s += seconds

    def end(
        self,
        started_s: float,
        model_s: float,
        device_bytes: int,
        budget_bytes: int,
        changes: dict[str, object],
    ) -> StepRecord:
        """End the pass. `model_s` = the forward call, waits for copies included. What remains is the caller's: `spent`
        adds the time after it, and `exact` follows from the KV of its sequences."""
        assert self._batch is not None, "no pass has begun"
        phase, tokens = self._batch.phase, self._batch.size
        counts, finished = self._expert_cache.take_counts(), self._transfers.take_finished()
        stalled_s, late_s = self._transfers.device_stall_s()
        stall_s = min(self.stall_s + stalled_s, model_s)
        record = Recorded(
            self._later(phase, tokens, finished),
            index=self._index,
            phase=phase,
            tokens=tokens,
            started_s=started_s - self.born_s,
            total_ms=model_s * 1e3,
            compute_ms=(model_s - stall_s) * 1e3,
            stall_ms=stall_s * 1e3,
            idle_ms=0.0,
            copy_ms=_busy_s(finished) * 1e3,
            **counts.figures(),
            predict_ms=self._prefetch_cost.predict_s * 1e3,
            net_ms=self._prefetch_cost.net_ms(counts, finished, self._prefetch_cost.late_s + late_s, stall_s),
            disk_bytes=sum([t.disk_bytes for t in finished]),
            slots=self._expert_cache.capacity,
            device_bytes=device_bytes,
            budget_bytes=budget_bytes,
            emulated=bool(self._transfers.pace),
            changes=changes,
            rows=self._batch.rows,
        )
        record.lossy = self._miss.take(tokens) if self._miss is not None else None
        if self._predictor_host is not None:
            self._predictor_host.answer_wait.passed(stall_s, self._prefetch_cost.spared_s)
        if self._throttle is not None:
            self._throttle.note(record)
        if self._capture is not None:
            self._capture.take(record)
        self._index += 1
        return record

    def configure(self, old: TelemetrySettings | None, new: TelemetrySettings) -> None:
        """Record, or do not, from the next pass on."""
        self.enabled = new.enabled

    def forget(self) -> None:
        """Discard everything counted and copied so far."""
        self._clear()
        self._expert_cache.take_counts()
        self._transfers.forget()

    @property
    def routed(self) -> Sequence[Sequence[Sequence[int]]]:
        """The router's choice [T][k] in each layer that the last pass ran, while recording is on."""
        return self._ids

    @property
    def index(self) -> int:
        """The index the next pass will have."""
        return self._index

    def _later(self, phase: Phase, tokens: int, finished: list[Ticket]) -> dict[str, Callable[[], Any]]:
        """Builders of the fields named in LATER. They hold numbers only, so that a record keeps no slot or copy
        alive."""
        ids, requests, born_s = array("h"), self._requests, self.born_s
        for rows in self._ids if len(self._ids) == self._shape.layers else ():
            for row in rows:
                ids.fromlist(row)
        counts = array("h", [n for layer, some in requests for n in (layer, len(some))])
        every = [one for _, some in requests for one in some]
        experts, outcomes = [one.expert for one in every], bytes([one.outcome for one in every])
        copies = (
            [
                (
                    t.eid,
                    t.bytes,
                    t.demand,
                    t.submitted_s - born_s,
                    t.started_s - born_s,
                    t.landed_s - born_s,
                    t.disk_bytes > 0,
                )
                for t in finished
            ]
            if self.enabled
            else []
        )
        top_k, of = self._shape.top_k, self._shape.experts
        return {
            "ids": lambda: np.frombuffer(ids, np.int16).reshape(-1, tokens, top_k),
            "layer": lambda: np.repeat(*np.frombuffer(counts, np.int16).reshape(-1, 2).T),
            "expert": lambda: np.array(experts, np.int16),
            "outcome": lambda: np.frombuffer(outcomes, np.uint8),
            "transfers": lambda: tuple(
                [
                    Transfer(
                        *divmod(eid, of),
                        size,
                        demand,
                        submitted_s,
                        started_s,
                        ended_s,
                        phase,
                        "disk" if disk else "host",
                    )
                    for eid, size, demand, submitted_s, started_s, ended_s, disk in copies
                ]
            ),
        }


def _busy_s(copies: Sequence[Ticket]) -> float:
    """Seconds in which at least one copy was under way: several may overlap."""
    busy_s = end_s = 0.0
    for copy in sorted(copies, key=lambda c: c.started_s):
        busy_s += max(0.0, copy.landed_s - max(copy.started_s, end_s))
        end_s = max(end_s, copy.landed_s)
    return busy_s
