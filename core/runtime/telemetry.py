"""Keeps the last forward passes and counters over all passes, and builds the frames of the live deck from them.

Adding a pass costs an append and never waits: everything else is computed for many passes at once, by the thread that
builds a frame, or by `catch_up`, when FOLD passes are pending and no thread builds one.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from core.metrics import BY_NAME, COUNTED, METRICS, REQUESTS, ROUTED, Outcome
from core.metrics.limit import COLUMNS, WINDOW, Fewest, SpeedLimit, speed_limit
from core.runtime.lossy_look import look
from core.types import Frame, Memory, ModelShape, Residence, StepRecord

View = tuple[npt.NDArray[np.float64], npt.NDArray[np.int16]]
Changing = tuple[Sequence[float], npt.NDArray[np.float32] | None]
"""[L] entropies at or below which nothing is replaced, and how good j is in the place of i, [E, E], in one layer."""
UNFETCHED = (Outcome.SUBSTITUTED, Outcome.DROPPED, Outcome.PREDICTED)  # missing, and not copied
SHOWN = tuple(one for one in METRICS if one.frame)
FOLD = 64  # most passes that are pending before they are counted: the compute thread must not be long about it

RING = 512  # forward passes kept
KEPT = (*COUNTED, *ROUTED)
COUNTS = tuple(one for one in REQUESTS if one.frame)
ROWS = {
    name: row
    for row, name in enumerate(
        ("index", *(one.name for one in KEPT), *(one.name for one in COUNTS), "decode", "delta", "beta")
    )
}
_values = attrgetter("index", *(one.name for one in KEPT))


class Telemetry:
    """Written by the compute thread, read by the thread that serves frames. The lock guards what is counted, and the
    compute thread never waits for it."""

    def __init__(self, shape: ModelShape) -> None:
        layers, experts = shape.layers, shape.experts
        self._shape = shape
        self._lock = threading.Lock()
        self._last: deque[StepRecord] = deque(maxlen=WINDOW)
        self._pending: deque[StepRecord] = deque()  # appended to and taken from without the lock
        self._timelines = Timelines(layers)
        self._coactivation = np.zeros((layers, experts, experts), np.uint32)
        self._activations = np.zeros((layers, experts), np.int64)
        self.marks: list[tuple[int, str]] = []
        self.version = 0
        self._peak_gbps = 0.0
        self._resting = False

    def catch_up(self) -> None:
        """Count the pending passes once there are many."""
        if len(self._pending) >= FOLD and self._lock.acquire(blocking=False):
            try:
                self._fold()
            finally:
                self._lock.release()

    @contextmanager
    def resting(self) -> Iterator[None]:
        """Inside, passes and changed settings are a measurement's own, and are left out."""
        self._resting = True
        try:
            yield
        finally:
            self._resting = False

    def add(self, step: StepRecord) -> None:
        """Add one forward pass, which nothing changes any more."""
        if self._resting:
            return
        self.catch_up()
        self._pending.append(step)
        self.version += 1

    def mark(self, index: int, text: str) -> None:
        """Record that a setting changed just before pass `index`."""
        if self._resting:
            return
        self.marks.append((index, text))
        del self.marks[:-200]
        self.version += 1

    def activations(self) -> npt.NDArray[np.int64]:
        """[L, E] tokens that the router sent to each expert since load."""
        with self._lock:
            self._fold()
            return self._activations.copy()

    def frame(
        self,
        layer: int,
        points: int,
        places: Sequence[int],
        memory: Memory,
        *,
        busy: bool,
        emulated: bool,
        link_limit_gbps: float,
        lossy: Changing | None = None,
        fewest: Fewest | None = None,
    ) -> Frame:
        """One consistent frame. `points` = passes shown in the timelines, at most RING; `lossy`: thresholds and
        substitution scores of the lossy options that are on; `fewest` as in `limit`."""
        with self._lock:
            self._fold()
            coactivation = self._coactivation[layer].copy()
            columns, outcomes = self._timelines.view()
            last = list(self._last)
        np.fill_diagonal(coactivation, 0)
        current, shown = columns[:, -WINDOW:], columns[:, -points:]
        is_decode = columns[ROWS["decode"]] == 1
        decode = np.flatnonzero(is_decode)[-WINDOW:]
        by_outcome = outcomes[decode].sum(0)  # [L, Outcome]
        requests, hits = by_outcome.sum(1), by_outcome[:, BY_NAME["hits"].outcomes].sum(1)
        total_ms, tokens, guessed = (
            float(columns[ROWS[one], decode].sum()) for one in ("total_ms", "tokens", "accepted")
        )
        written = decode.size + int(guessed)  # by one sequence of each pass
        span_s, *moved = (sum(current[ROWS[name]].tolist()) for name in ("total_ms", "demand_bytes", "prefetch_bytes"))
        with np.errstate(invalid="ignore"):
            hit_rate = (hits / np.where(requests, requests, np.nan)).astype(np.float32)

        gates = shown[ROWS["delta"]].astype(np.float32), shown[ROWS["beta"]].astype(np.float32)
        return Frame(
            version=self.version,
            shape=self._shape,
            busy=busy,
            place=self._place(places, last),
            hit_rate=hit_rate,
            coactivation=coactivation,
            window=written,
            passes=current.shape[1],
            columns=_timelines(shown),
            marks=list(self.marks),
            memory=memory,
            tok_s=1e3 * tokens / total_ms if total_ms else 0.0,
            tpot_ms=total_ms / written if written else 0.0,
            hit=float(hits.sum() / requests.sum()) if requests.sum() else float("nan"),
            link_gbps=sum(moved) / (span_s / 1e3) / 1e9 if span_s else 0.0,
            link_peak_gbps=self._peak_gbps,
            link_limit_gbps=link_limit_gbps,
            emulated=emulated,
            exact=last[-1].exact if last else True,
            net_ms=float(columns[ROWS["net_ms"], decode].mean()) if decode.size else 0.0,
            prefetched=_prefetched(columns[:, decode]),
            lossy=look(last, *gates, self._shape.layers, *lossy) if lossy is not None else None,
            limit=self._limit((columns, outcomes), fewest, points),
        )

    def limit(self, fewest: Fewest | None) -> SpeedLimit:
        """The speed limit over the tokens of `fewest`, or the last WINDOW, with all passes that are kept."""
        with self._lock:
            self._fold()
            return self._limit(self._timelines.view(), fewest, RING)

    def _limit(self, timelines: View, fewest: Fewest | None, points: int) -> SpeedLimit:
        found = {name: timelines[0][ROWS[name]] for name in COLUMNS if name in ROWS}
        found["unfetched"] = timelines[1][:, :, list(UNFETCHED)].sum((1, 2), dtype=np.float64)
        return speed_limit(found, fewest, self._shape.expert_bytes, points)

    def _note_peak(self, fresh: int) -> None:
        """The highest rate of the link over WINDOW passes, with `fresh` new ones, as a frame after each would give."""
        columns, _ = self._timelines.view()
        ms, moved = columns[ROWS["total_ms"]], columns[ROWS["demand_bytes"]] + columns[ROWS["prefetch_bytes"]]
        ends = np.arange(max(0, ms.size - fresh), ms.size)
        begins = np.maximum(0, ends + 1 - WINDOW)
        spent, bytes_ = (np.concatenate(([0.0], np.cumsum(each))) for each in (ms, moved))
        spans = spent[ends + 1] - spent[begins]
        rates = (bytes_[ends + 1] - bytes_[begins])[spans > 0] / spans[spans > 0] / 1e6
        self._peak_gbps = max(self._peak_gbps, float(rates.max(initial=0.0)))

    def _place(self, places: Sequence[int], last: Sequence[StepRecord]) -> npt.NDArray[np.uint8]:
        size = self._shape.layers * self._shape.experts  # without those of a head
        place = np.frombuffer(bytearray(places[:size]), np.uint8).reshape(self._shape.layers, self._shape.experts)
        if last:
            used = last[-1].layer.astype(np.int64), last[-1].expert.astype(np.int64)
            place[used] = np.where(place[used] == Residence.RESIDENT, Residence.HIT_NOW, place[used])
        return place

    def _fold(self) -> None:
        """Add the pending passes to the timelines, and their routings to the counters. Requires the lock."""
        while self._pending:
            self._count([self._pending.popleft() for _ in range(min(FOLD, len(self._pending)))])

    def _count(self, steps: Sequence[StepRecord]) -> None:
        self._last.extend(steps)
        self._timelines.extend(steps)
        self._note_peak(len(steps))
        routed = [s.ids for s in steps if s.ids.size]
        if not routed:
            return
        ids = np.concatenate(routed, axis=1).astype(np.int64)  # [L, tokens, k]
        experts = self._shape.experts
        base = (np.arange(self._shape.layers) * experts)[:, None, None] + ids
        np.add.at(self._activations.reshape(-1), base.ravel(), 1)
        pairs = base[..., :, None] * experts + ids[..., None, :]
        np.add.at(self._coactivation.reshape(-1), pairs.ravel(), np.uint32(1))


def _timelines(columns: npt.NDArray[np.float64]) -> dict[str, npt.NDArray[Any]]:
    """Frame.columns of these columns of Timelines."""
    found: dict[str, npt.NDArray[Any]] = {
        "step": columns[ROWS["index"]].astype(np.int32),
        "decode": columns[ROWS["decode"]].astype(np.uint8),
    }
    for one in SHOWN:
        found[one.name] = columns[ROWS[one.name]].astype(one.array)
    found["prefetch_bytes"] = (found["prefetch_bytes"] - found["wasted_bytes"]).clip(0)
    return found


def _prefetched(columns: npt.NDArray[np.float64]) -> tuple[int, int, int, int]:
    """Prefetched experts that were used, late, wasted, and wasted because they were evicted before their layer was
    reached."""
    used, late, wasted, evicted = (
        int(columns[ROWS[f"prefetch_{name}"]].sum()) for name in ("used", "late", "wasted", "evicted")
    )
    return used, late, wasted, evicted


class Timelines:
    """The last RING passes. What was written is never written again, so a view stays valid while passes are added."""

    def __init__(self, layers: int) -> None:
        self._layers = layers
        self._end = 0
        self._columns = np.empty((len(ROWS), 2 * RING))
        self._outcomes = np.empty((2 * RING, layers, len(Outcome)), np.int16)

    def extend(self, steps: Sequence[StepRecord]) -> None:
        """Append up to RING passes."""
        if self._end + len(steps) > 2 * RING:
            columns, outcomes = self.view()
            self._columns, self._outcomes = np.empty_like(self._columns), np.empty_like(self._outcomes)
            self._columns[:, :RING], self._outcomes[:RING], self._end = columns, outcomes, RING
        at = slice(self._end, self._end + len(steps))
        columns = self._columns[:, at]
        columns[: 1 + len(KEPT)] = np.array([_values(step) for step in steps]).T
        columns[ROWS["decode"]] = [step.phase == "decode" for step in steps]
        for name in ("delta", "beta"):
            columns[ROWS[name]] = [np.nan if step.lossy is None else mean(getattr(step.lossy, name)) for step in steps]
        self._outcomes[at], by_pass = _outcomes(steps, self._layers)
        for one in COUNTS:
            columns[ROWS[one.name]] = by_pass[:, one.outcomes].sum(1)
        self._end = at.stop

    def view(self) -> View:
        """The columns [ROWS, N] of the last N passes, oldest first, and their requests by layer and outcome
        [N, L, Outcome]."""
        kept = slice(max(0, self._end - RING), self._end)
        return self._columns[:, kept], self._outcomes[kept]


def _outcomes(steps: Sequence[StepRecord], layers: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Requests [len(steps), layers, Outcome], and over all layers [len(steps), Outcome]."""
    kinds, passes = len(Outcome), len(steps)
    outcome = np.concatenate([step.outcome for step in steps])
    of = np.repeat(np.arange(passes), [step.outcome.size for step in steps])
    cell = (of * layers + np.concatenate([step.layer for step in steps])) * kinds + outcome
    return (
        np.bincount(cell, minlength=passes * layers * kinds).reshape(passes, layers, kinds),
        np.bincount(of * kinds + outcome, minlength=passes * kinds).reshape(passes, kinds),
    )


def mean(values: npt.NDArray[np.float32]) -> float:
    """The mean over the layers [L] that have a value; NaN without any."""
    there = values[~np.isnan(values)]
    return float(there.mean()) if there.size else np.nan
