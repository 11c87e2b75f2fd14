"""Ring buffers and counters over StepRecords, and the frames that the live deck draws from them."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import numpy.typing as npt

from core.types import Frame, Memory, ModelShape, Outcome, StepRecord

RING = 4096    # forward passes kept for the timelines
WINDOW = 64    # passes that "now" means: tok/s, hit rate and link rate are over the last 64
_COLUMNS = np.dtype([("index", "i4"), ("decode", "u1"), ("tokens", "i4"), ("started_s", "f8"), ("total_ms", "f4"),
                     ("compute_ms", "f4"), ("stall_ms", "f4"), ("requests", "i4"), ("hits", "i4"),
                     ("demand_bytes", "f4"), ("prefetch_bytes", "f4"), ("wasted_bytes", "f4")])


class Telemetry:
    """Written by the thread that computes, read by the one that serves frames; a lock keeps the two apart."""

    def __init__(self, shape: ModelShape) -> None:
        layers, experts = shape.layers, shape.experts
        self._shape = shape
        self._lock = threading.Lock()
        self._ring: npt.NDArray[Any] = np.zeros(RING, _COLUMNS)
        self._hits = np.zeros((RING, layers), np.int16)
        self._requests = np.zeros((RING, layers), np.int16)
        self._count = 0
        self._pending: list[npt.NDArray[np.int16]] = []
        self._coactivation = np.zeros((layers, experts, experts), np.uint32)
        self.outcomes = np.zeros((2, layers, len(Outcome)), np.int64)       # [prefill | decode, L, Outcome]
        self.activations = np.zeros((layers, experts), np.int64)            # tokens routed to each expert
        self.marks: list[tuple[int, str]] = []
        self.version = 0
        self._last: StepRecord | None = None

    def add(self, step: StepRecord) -> None:
        """Count one forward pass."""
        with self._lock:
            at, decode = self._count % RING, int(step.phase == "decode")
            hit = step.outcome <= Outcome.PREFETCH_HIT
            self._ring[at] = (step.index, decode, step.tokens, step.started_s, step.total_ms, step.compute_ms,
                              step.stall_ms, step.outcome.size, int(hit.sum()), step.demand_bytes,
                              step.prefetch_bytes, step.wasted_bytes)
            layers = self._shape.layers
            self._requests[at] = np.bincount(step.layer, minlength=layers)
            self._hits[at] = np.bincount(step.layer, hit, minlength=layers)
            if step.ids.size:
                self._pending.append(step.ids)
            self._pending_outcomes(step, decode)
            self._count += 1
            self._last = step
            if len(self._pending) >= 256:
                self._fold()
        self.version += 1

    def mark(self, index: int, text: str) -> None:
        """Remember that a setting changed just before pass `index`."""
        self.marks.append((index, text))
        del self.marks[:-200]
        self.version += 1

    def frame(self, layer: int, points: int, places: list[int], memory: Memory, *, busy: bool, emulated: bool,
              link_peak_gbps: float) -> Frame:
        """One consistent look. `points` = how many passes the timelines show."""
        with self._lock:
            self._fold()
            rows = np.arange(max(0, self._count - min(points, RING)), self._count) % RING
            ring, last = self._ring[rows], self._last
            now = rows[-WINDOW:][self._ring[rows[-WINDOW:]]["decode"] == 1]
            requests, hits = self._requests[now].sum(0), self._hits[now].sum(0)
            coactivation = self._coactivation[layer].copy()
        np.fill_diagonal(coactivation, 0)
        shape = self._shape
        place = np.array(places, np.uint8).reshape(shape.layers, shape.experts)
        if last is not None:
            used = last.layer.astype(np.int64), last.expert.astype(np.int64)
            place[used] = np.where(place[used] == 2, 3, place[used])
        recent = ring[-WINDOW:]
        total_ms = float(ring[ring["decode"] == 1][-WINDOW:]["total_ms"].mean()) if (ring["decode"] == 1).any() else 0.0
        moved = float((recent["demand_bytes"] + recent["prefetch_bytes"]).sum())
        span_s = float(recent["total_ms"].sum()) / 1e3
        with np.errstate(invalid="ignore"):
            hit_rate = (hits / np.where(requests, requests, np.nan)).astype(np.float32)
        return Frame(
            version=self.version, shape=shape, busy=busy, place=place, hit_rate=hit_rate, coactivation=coactivation,
            window=WINDOW, step=ring["index"].copy(), decode=ring["decode"].copy(),
            started_s=ring["started_s"].astype(np.float32), total_ms=ring["total_ms"].copy(),
            compute_ms=ring["compute_ms"].copy(), stall_ms=ring["stall_ms"].copy(), requests=ring["requests"].copy(),
            hits=ring["hits"].copy(), demand_bytes=ring["demand_bytes"].copy(),
            prefetch_bytes=(ring["prefetch_bytes"] - ring["wasted_bytes"]).clip(0), wasted_bytes=ring["wasted_bytes"].copy(),
            marks=list(self.marks), memory=memory, tok_s=1e3 / total_ms if total_ms else 0.0, tpot_ms=total_ms,
            hit=float(hits.sum() / requests.sum()) if requests.sum() else float("nan"),
            link_gbps=moved / span_s / 1e9 if span_s else 0.0, link_peak_gbps=link_peak_gbps, emulated=emulated,
            exact=last.exact if last is not None else True)

    def _pending_outcomes(self, step: StepRecord, decode: int) -> None:
        kinds = len(Outcome)
        flat = np.bincount(step.layer.astype(np.int64) * kinds + step.outcome, minlength=self._shape.layers * kinds)
        self.outcomes[decode] += flat.reshape(self._shape.layers, kinds)

    def _fold(self) -> None:
        """Add the pending routings to the co-activation and activation counts, many passes at once."""
        if not self._pending:
            return
        ids = np.concatenate(self._pending, axis=1).astype(np.int64)   # [L, tokens, k]
        self._pending.clear()
        experts = self._shape.experts
        base = (np.arange(self._shape.layers) * experts)[:, None, None] + ids
        np.add.at(self.activations.reshape(-1), base.ravel(), 1)
        pairs = base[..., :, None] * experts + ids[..., None, :]
        np.add.at(self._coactivation.reshape(-1), pairs.ravel(), np.uint32(1))
