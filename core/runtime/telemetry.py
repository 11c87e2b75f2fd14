"""Keeps the last forward passes and counters over all passes, and builds the frames of the live deck from them.

Adding a pass costs two appends: everything else is computed when a frame is requested, many passes at once.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from core.runtime.lossy_summary import look
from core.types import Frame, Memory, ModelShape, Outcome, Residence, StepRecord

Changing = tuple[Sequence[float], npt.NDArray[np.float32] | None]
"""[L] entropies at or below which nothing is replaced, and how good j is in the place of i, [E, E], in one layer."""
RING = 512  # forward passes kept for the timelines: a pass with its copies can take 15 kB, and a deck shows 240
WINDOW = 64  # passes of the current figures: tok/s, hit rate and link rate are over the last 64
FOLD = 512  # most passes that are pending before they are counted


class Telemetry:
    """Written by the compute thread, read by the thread that serves frames; guarded by a lock."""

    def __init__(self, shape: ModelShape) -> None:
        layers, experts = shape.layers, shape.experts
        self._shape = shape
        self._lock = threading.Lock()
        self._steps: deque[StepRecord] = deque(maxlen=RING)
        self._pending: list[StepRecord] = []
        self._coactivation = np.zeros((layers, experts, experts), np.uint32)
        self._activations = np.zeros((layers, experts), np.int64)
        self.marks: list[tuple[int, str]] = []
        self.version = 0

    def add(self, step: StepRecord) -> None:
        """Add one forward pass."""
        with self._lock:
            self._steps.append(step)
            self._pending.append(step)
            if len(self._pending) >= FOLD:
                self._fold()
        self.version += 1

    def mark(self, index: int, text: str) -> None:
        """Record that a setting changed just before pass `index`."""
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
        link_peak_gbps: float,
        lossy: Changing | None = None,
    ) -> Frame:
        """One consistent frame. `points` = passes shown in the timelines, at most RING; `lossy`: thresholds and
        substitution scores of the lossy options that are on."""
        with self._lock:
            self._fold()
            coactivation = self._coactivation[layer].copy()
            kept = list(self._steps)
        np.fill_diagonal(coactivation, 0)
        tail, window = kept[-points:], kept[-WINDOW:]
        decode = [s for s in window if s.phase == "decode"] or [s for s in kept if s.phase == "decode"][-WINDOW:]
        requests, hits = _per_layer(decode, self._shape.layers)
        tpot_ms = float(np.mean([s.total_ms for s in decode])) if decode else 0.0
        span_s = sum(s.total_ms for s in window) / 1e3
        moved = sum(s.demand_bytes + s.prefetch_bytes for s in window)
        with np.errstate(invalid="ignore"):
            hit_rate = (hits / np.where(requests, requests, np.nan)).astype(np.float32)

        def column(name: str, dtype: type) -> npt.NDArray[Any]:
            return np.array([getattr(s, name) for s in tail], dtype)

        wasted = column("wasted_bytes", np.float32)
        return Frame(
            version=self.version,
            shape=self._shape,
            busy=busy,
            place=self._place(places, kept),
            hit_rate=hit_rate,
            coactivation=coactivation,
            window=WINDOW,
            step=column("index", np.int32),
            decode=np.array([s.phase == "decode" for s in tail], np.uint8),
            started_s=column("started_s", np.float32),
            total_ms=column("total_ms", np.float32),
            compute_ms=column("compute_ms", np.float32),
            stall_ms=column("stall_ms", np.float32),
            predict_ms=column("predict_ms", np.float32),
            requests=column("requests", np.int32),
            hits=column("hits", np.int32),
            demand_bytes=column("demand_bytes", np.float32),
            prefetch_bytes=(column("prefetch_bytes", np.float32) - wasted).clip(0),
            wasted_bytes=wasted,
            disk_bytes=column("disk_bytes", np.float32),
            marks=list(self.marks),
            memory=memory,
            tok_s=1e3 / tpot_ms if tpot_ms else 0.0,
            tpot_ms=tpot_ms,
            hit=float(hits.sum() / requests.sum()) if requests.sum() else float("nan"),
            link_gbps=moved / span_s / 1e9 if span_s else 0.0,
            link_peak_gbps=link_peak_gbps,
            emulated=emulated,
            exact=kept[-1].exact if kept else True,
            net_ms=float(np.mean([s.net_ms for s in decode])) if decode else 0.0,
            prefetched=_prefetched(window),
            lossy=None if lossy is None else look(window, tail, self._shape.layers, *lossy),
        )

    def _place(self, places: Sequence[int], kept: Sequence[StepRecord]) -> npt.NDArray[np.uint8]:
        place = np.array(places, np.uint8).reshape(self._shape.layers, self._shape.experts)
        if kept:
            used = kept[-1].layer.astype(np.int64), kept[-1].expert.astype(np.int64)
            place[used] = np.where(place[used] == Residence.RESIDENT, Residence.HIT_NOW, place[used])
        return place

    def _fold(self) -> None:
        """Add the pending routings to the counters."""
        routed = [s.ids for s in self._pending if s.ids.size]
        self._pending.clear()
        if not routed:
            return
        ids = np.concatenate(routed, axis=1).astype(np.int64)  # [L, tokens, k]
        experts = self._shape.experts
        base = (np.arange(self._shape.layers) * experts)[:, None, None] + ids
        np.add.at(self._activations.reshape(-1), base.ravel(), 1)
        pairs = base[..., :, None] * experts + ids[..., None, :]
        np.add.at(self._coactivation.reshape(-1), pairs.ravel(), np.uint32(1))


def _prefetched(steps: Sequence[StepRecord]) -> tuple[int, int, int, int]:
    """Prefetched experts that were used, late, wasted, and wasted because they were evicted before their layer was
    reached."""
    used, late, wasted, evicted = (
        sum(getattr(step, f"prefetch_{name}") for step in steps) for name in ("used", "late", "wasted", "evicted")
    )
    return used, late, wasted, evicted


def _per_layer(steps: Sequence[StepRecord], layers: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """(requests, hits) per layer [L] over `steps`."""
    if not steps:
        return np.zeros(layers, np.int64), np.zeros(layers, np.int64)
    layer = np.concatenate([s.layer for s in steps])
    hit = np.concatenate([s.outcome for s in steps]) <= Outcome.PREFETCH_HIT
    return np.bincount(layer, minlength=layers), np.bincount(layer[hit], minlength=layers)
