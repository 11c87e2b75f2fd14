"""Builds the StepRecord of each forward pass from what was measured; makes no device queries of its own."""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence

from core.cache.expert_cache import ExpertCache
from core.cache.lease import Counts, LeasedSegment, SkippedRequest
from core.cache.prefetch_cost import PrefetchCost
from core.memory.transfer import Ticket, TransferEngine
from core.policy.prefetch.throttle import PrefetchThrottle
from core.prediction.predictor_host import PredictorHost
from core.runtime.batch import Batch
from core.runtime.miss import MissPolicy
from core.runtime.recorded import Noted, Recorded
from core.runtime.trace_capture import TraceCapture
from core.settings.telemetry import TelemetrySettings
from core.types import ModelShape, StepRecord

Requests = Sequence[LeasedSegment | SkippedRequest]


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
        self._layers: list[tuple[int, list[list[int]], Requests | None]] = []  # those that ran, as `layer` got them
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
        self._layers.clear()
        self.stall_s = 0.0
        self._prefetch_cost.begin()
        if self._miss is not None:
            self._miss.forget()

    def layer(self, layer: int, ids: list[list[int]], requests: Requests | None) -> None:
        """Record one computed MoE layer: the router's choice [T][k] and the outcome of each distinct expert's request;
        None = the experts of one token, all of them hits."""
        if self.enabled:
            self._layers.append((layer, ids, requests))

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
        record = Recorded(self._noted(counts, finished), phase, tokens)
        record.index, record.rows, record.changes = self._index, self._batch.rows, changes
        record.started_s, record.total_ms = started_s - self.born_s, model_s * 1e3
        record.compute_ms, record.stall_ms = (model_s - stall_s) * 1e3, stall_s * 1e3
        record.copy_ms, record.disk_bytes = _busy_s(finished) * 1e3, sum([t.disk_bytes for t in finished])
        record.predict_ms = self._prefetch_cost.predict_s * 1e3
        record.net_ms = self._prefetch_cost.net_ms(counts, finished, self._prefetch_cost.late_s + late_s, stall_s)
        record.slots, record.emulated = self._expert_cache.capacity, bool(self._transfers.pace)
        record.device_bytes, record.budget_bytes = device_bytes, budget_bytes
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
        return [ids for _, ids, _ in self._layers]

    @property
    def index(self) -> int:
        """The index the next pass will have."""
        return self._index

    def _noted(self, counts: Counts, finished: Sequence[Ticket]) -> Noted:
        """What the pass noted, as numbers."""
        ids, layers, experts, outcomes = array("h"), array("h"), array("h"), bytearray()
        whole, born_s = len(self._layers) == self._shape.layers, self.born_s
        for layer, rows, requests in self._layers:
            for row in rows if whole else ():
                ids.fromlist(row)
            if requests is None:
                layers.fromlist([layer, len(rows[0])])
                experts.fromlist(rows[0])
                outcomes += bytes(len(rows[0]))  # Outcome.HIT of each
            else:
                layers.fromlist([layer, len(requests)])
                experts.fromlist([one.expert for one in requests])
                outcomes += bytes([one.outcome for one in requests])
        copies = [
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
        of = self._shape
        return Noted(
            counts.values(), ids, layers, experts, bytes(outcomes), copies if self.enabled else (), of.experts, of.top_k
        )


def _busy_s(copies: Sequence[Ticket]) -> float:
    """Seconds in which at least one copy was under way: several may overlap."""
    busy_s = end_s = 0.0
    for copy in sorted(copies, key=lambda c: c.started_s):
        busy_s += max(0.0, copy.landed_s - max(copy.started_s, end_s))
        end_s = max(end_s, copy.landed_s)
    return busy_s
