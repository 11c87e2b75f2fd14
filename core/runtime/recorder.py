"""Records each forward pass: the events of its parts as plain numbers, of which the arrays of the step record are made
when it is read. Makes no device queries of its own."""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from dataclasses import MISSING, fields
from typing import Any, NamedTuple

import numpy as np

from core.cache.counts import FIGURES, Counts, PrefetchCost
from core.cache.expert_cache import ExpertCache
from core.memory.codec.native.threads import steps_ticks, ticks
from core.memory.transfer import Ticket, TransferEngine
from core.metrics.record import Origin
from core.policy.throttle import Throttle
from core.runtime.batch import Batch
from core.runtime.miss import MissPolicy
from core.runtime.prediction.predictor_host import PredictorHost
from core.runtime.rows import distinct
from core.runtime.step_sink import Requests
from core.runtime.trace_capture import TraceCapture
from core.settings.telemetry import TelemetrySettings
from core.types import ModelShape, Outcome, Phase, StepRecord, Transfer, Underway

LONG_S = 0.3  # a pass that takes longer is shown while it is computed
LATER = frozenset((*FIGURES, "ids", "layer", "expert", "outcome", "transfers"))
DEFAULTS = {one.name: one.default for one in fields(StepRecord) if one.default is not MISSING and one.name not in LATER}
Ran = tuple[int, list[list[int]], Requests | None]
"""A layer that ran: which, the router's choice [T][k], and the outcome of each distinct expert's request; None = all of
them were hits."""
Copy = tuple[int, int, bool, float, float, float, bool]
"""(eid, bytes, demand, submitted, started, ended: seconds on the session's clock, whether it was read from disk)"""


class RawStep(NamedTuple):
    """Routing, requests and copies of a pass. Numbers alone, so that no slot stays alive for it, and flat, so that
    there is little to collect."""

    shape: ModelShape
    counts: Counts  # without tickets
    copies: Sequence[Copy]
    layers: list[int]  # that ran
    chosen: array[int]  # by the router: of each of these layers, row by row
    requests: tuple[list[int], array[int], bytearray] | None
    """How many each of these layers made, then the expert and the outcome of each; None = those of one token, all of
    them hits."""


def flattened(shape: ModelShape, counts: Counts, copies: Sequence[Copy], ran: Sequence[Ran]) -> RawStep:
    """The layers that ran, as plain numbers."""
    chosen = array("h")
    for _, ids, _ in ran:
        for row in ids:
            chosen.fromlist(row)
    requests = None
    if [some for _, ids, some in ran if some is not None or len(ids) > 1]:
        made, experts, outcomes = list[int](), array("h"), bytearray()
        for _, ids, some in ran:
            named = distinct(ids) if some is None else [one.expert for one in some]
            made.append(len(named))
            experts.fromlist(named)
            outcomes += bytes([Outcome.HIT] * len(named) if some is None else [one.outcome for one in some])
        requests = made, experts, outcomes
    return RawStep(shape, counts, copies, [layer for layer, _, _ in ran], chosen, requests)


class LazyStepRecord(StepRecord):
    """A StepRecord whose fields named in LATER are made when one of them is first read, on the reading thread, to keep
    that work out of the pass. Two threads that read at once make equal values. The recorder sets the others, or they
    have their default."""

    __slots__ = ("_computed", "_raw")

    def __init__(self, raw: RawStep, phase: Phase, tokens: int, computed: int) -> None:
        """`tokens`: of the `computed` ones, those that are kept, which come first."""
        self._raw: RawStep | None = raw
        self._computed = computed
        self.phase, self.tokens, self.idle_ms, self.lossy = phase, tokens, 0.0, None

    def __getattr__(self, name: str) -> Any:
        """Called only for attributes that are not set, or not yet."""
        raw: RawStep | None = object.__getattribute__(self, "_raw")
        if raw is not None and name in LATER:
            self._make(raw)
            self._raw = None  # last: a thread that finds None finds the fields
        elif name in DEFAULTS:
            setattr(self, name, DEFAULTS[name])
        return object.__getattribute__(self, name)

    def _make(self, raw: RawStep) -> None:
        for name, count in zip(FIGURES, raw.counts.values(), strict=True):
            setattr(self, name, count)
        shape, layers, chosen = raw.shape, np.array(raw.layers, np.int16), np.frombuffer(raw.chosen, np.int16)
        whole = len(layers) == shape.layers
        self.ids = (chosen if whole else chosen[:0]).reshape(-1, self._computed, shape.top_k)[:, : self.tokens]
        if raw.requests is None:
            self.layer, self.expert = np.repeat(layers, shape.top_k), chosen
            self.outcome = np.zeros(len(chosen), np.uint8)  # Outcome.HIT of each
        else:
            made, experts, outcomes = raw.requests
            self.layer, self.expert = np.repeat(layers, made), np.frombuffer(experts, np.int16)
            self.outcome = np.frombuffer(outcomes, np.uint8)
        self.transfers = tuple([self._transfer(shape.experts, copy) for copy in raw.copies])

    def _transfer(self, experts: int, copy: Copy) -> Transfer:
        eid, size, demand, submitted_s, started_s, ended_s, from_disk = copy
        layer, expert = divmod(eid, experts)
        origin: Origin = "disk" if from_disk else "host"
        return Transfer(layer, expert, size, demand, submitted_s, started_s, ended_s, self.phase, origin)


class Recorder:
    """A `core.runtime.step_sink.StepSink` for answers: `begin`, `layer` once per MoE layer, `end`. `born_s` is the zero
    of the session's clock. Records contain what `miss` changed and what `capture` captured; `throttle` judges by them.
    How long a pass stalled bounds the wait for the predictor of `predictor_host`."""

    def __init__(
        self,
        shape: ModelShape,
        expert_cache: ExpertCache,
        transfers: TransferEngine,
        miss: MissPolicy | None = None,
        capture: TraceCapture | None = None,
        throttle: Throttle | None = None,
        predictor_host: PredictorHost | None = None,
    ) -> None:
        self._shape, self._expert_cache, self._transfers = shape, expert_cache, transfers
        self._miss, self._capture, self._throttle = miss, capture, throttle
        self._predictor_host = predictor_host
        self.born_s = time.perf_counter()
        self.enabled = True
        self.counts_steps = False
        """Whether native steps compute the model, and how long they take is to be recorded."""
        self._ticks = 0
        self._index = 0
        self._begun_s = 0.0  # of the pass that is being computed; 0 = none
        self.latest: RawStep | None = None
        """Routing and requests of the latest pass; without layers while nothing is recorded."""
        self._batch: Batch | None = None
        self._ran: list[Ran] = []
        self.stall_s = self._host_s = self._join_s = 0.0
        self._prefetch_cost = PrefetchCost()

    def begin(self, batch: Batch) -> None:
        """Start a pass: clears what was recorded of the one before."""
        self._batch = batch
        self._clear()
        if self.counts_steps:
            self._ticks = steps_ticks()
        self._begun_s = time.perf_counter()
        if self._miss is not None:
            self._miss.begin(batch.phase)
        if self._capture is not None:
            self._capture.begin(batch)

    def _clear(self) -> None:
        self._ran.clear()
        self.stall_s = self._host_s = self._join_s = 0.0
        self._prefetch_cost.begin()

    def layer(self, layer: int, ids: list[list[int]], requests: Requests | None) -> None:
        """Record one computed MoE layer: the router's choice [T][k] and the outcome of each distinct expert's request;
        None = all of them were hits."""
        if self.enabled:
            self._ran.append((layer, ids, requests))

    def waited(self, seconds: float, *, late: bool) -> None:
        """Add a wait for a copy; `late`: for a prefetch that did not land in time."""
        self.stall_s += seconds
        if late:
            self._prefetch_cost.late_s += seconds

    def hosted(self, took_s: float, waited_s: float) -> None:
        """Add time in which threads of the host computed missing experts, and in which this thread took part or waited
        for them."""
        self._host_s += took_s
        self._join_s += waited_s

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
        drafted: int = 0,
        refused: int = 0,
    ) -> StepRecord:
        """End the pass. `model_s` = the forward call, waits for copies included. Of its tokens, `drafted` were guessed,
        and the last `refused` of those are not kept. What remains is the caller's: `spent` adds the time after it, and
        `exact` follows from the KV of its sequences."""
        assert self._batch is not None, "no pass has begun"
        cost, rows, self._begun_s = self._prefetch_cost, self._batch.rows, 0.0
        computed = sum([count for _, count in rows])
        if drafted:
            rows = ((rows[0][0], computed - refused),)
        counts, finished = self._expert_cache.take_counts(), self._transfers.take_finished()
        stalled_s, late_s = self._transfers.device_stall_s()
        stall_s = min(self.stall_s + stalled_s, model_s)
        raw = flattened(self._shape, counts, self._copies(finished) if finished else (), self._ran)
        self.latest = raw
        record = LazyStepRecord(raw, self._batch.phase, computed - refused, computed)
        if drafted:
            record.drafted, record.accepted = drafted, drafted - refused
        record.index, record.rows, record.changes = self._index, rows, changes
        record.started_s, record.total_ms = started_s - self.born_s, model_s * 1e3
        record.compute_ms, record.stall_ms = (model_s - stall_s) * 1e3, stall_s * 1e3
        record.copy_ms = _busy_s(finished) * 1e3 if finished else 0.0
        record.disk_bytes = sum([t.disk_bytes for t in finished])
        record.predict_ms, record.host_ms = cost.predict_s * 1e3, self._host_s * 1e3
        record.net_ms = cost.net_ms(counts, finished, cost.late_s + late_s, stall_s)
        if self.counts_steps:
            record.kernel_ms = (steps_ticks() - self._ticks) * ticks().tick_s() * 1e3
        if cost.caused_s:
            record.caused_ms = cost.caused_s * 1e3
        if self._join_s:
            record.join_ms = self._join_s * 1e3
        counts.forget_tickets()
        record.slots, record.emulated = self._expert_cache.capacity, bool(self._transfers.pace)
        record.device_bytes, record.budget_bytes = device_bytes, budget_bytes
        if self._miss is not None and self._miss.active:
            record.lossy = self._miss.take(record.tokens)
        if self._predictor_host is None or self._predictor_host.predicts:
            self._judge(record, stall_s)
        if self._capture is not None:
            self._capture.take(record)
        self._index += 1
        return record

    def _judge(self, record: StepRecord, stall_s: float) -> None:
        """Whether predicting was worth its time, and waiting for it."""
        if self._predictor_host is not None:
            self._predictor_host.answer_wait.passed(stall_s, self._prefetch_cost.spared_s)
        if self._throttle is not None:
            self._throttle.note(record)

    def underway(self) -> Underway | None:
        """The pass that is being computed, once it has taken LONG_S; of any thread."""
        batch, begun_s, now_s = self._batch, self._begun_s, time.perf_counter()
        if batch is None or not begun_s or now_s - begun_s < LONG_S:
            return None
        tokens = sum([count for _, count in batch.rows])
        return Underway(now_s - begun_s, tokens, len(self._ran), *self._transfers.untaken_bytes())

    def configure(self, old: TelemetrySettings | None, new: TelemetrySettings) -> None:
        """Record, or do not, from the next pass on."""
        self.enabled = new.enabled

    def forget(self) -> None:
        """Discard everything counted and copied so far."""
        self._clear()
        if self._miss is not None:
            self._miss.forget()
        self._expert_cache.take_counts()
        self._transfers.forget()

    @property
    def routed(self) -> Sequence[Sequence[Sequence[int]]]:
        """The router's choice [T][k] in each layer that the last pass ran, while recording is on."""
        return [ids for _, ids, _ in self._ran]

    @property
    def index(self) -> int:
        """The index the next pass will have."""
        return self._index

    def _copies(self, finished: Sequence[Ticket]) -> list[Copy]:
        """Of a pass that is recorded."""
        copies, born_s = list[Copy](), self.born_s
        for one in finished if self.enabled else ():
            times = one.submitted_s - born_s, one.started_s - born_s, one.landed_s - born_s
            copies.append((one.eid, one.bytes, one.demand, *times, one.disk_bytes > 0))
        return copies


def _busy_s(copies: Sequence[Ticket]) -> float:
    """Seconds in which at least one copy was under way: several may overlap."""
    busy_s = end_s = 0.0
    for copy in sorted(copies, key=lambda c: c.started_s):
        busy_s += max(0.0, copy.landed_s - max(copy.started_s, end_s))
        end_s = max(end_s, copy.landed_s)
    return busy_s
