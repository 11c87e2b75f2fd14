"""Turns what happens during one forward pass into a StepRecord; asks nothing of the device that was not measured."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from core.memory.transfer import TransferEngine
from core.runtime.lease import Held
from core.runtime.residency import Residency
from core.types import ModelShape, Phase, StepRecord, Transfer


class Recorder:
    """One pass at a time: `begin`, `layer` once a MoE layer, `end`. `born_s` is the zero of the session's clock."""

    def __init__(self, shape: ModelShape, residency: Residency, transfers: TransferEngine) -> None:
        self._shape, self._residency, self._transfers = shape, residency, transfers
        self.born_s = time.perf_counter()
        self.enabled = True
        self._index = 0
        self._ids: list[Sequence[Sequence[int]]] = []
        self._held: list[tuple[int, list[Held]]] = []
        self.stall_s = 0.0

    def begin(self) -> None:
        """Forget the previous pass."""
        self._ids.clear()
        self._held.clear()
        self.stall_s = 0.0

    def layer(self, layer: int, ids: Sequence[Sequence[int]], held: list[Held]) -> None:
        """One MoE layer was computed: the router's choice [T][k] and what each distinct expert's request met."""
        if self.enabled:
            self._ids.append(ids)
            self._held.append((layer, held))

    def end(self, phase: Phase, tokens: int, started_s: float, model_s: float, device_bytes: int, budget_bytes: int,
            changes: dict[str, object]) -> StepRecord:
        """The pass is over. `model_s` = the forward call, waits for copies included; `spent` adds what follows it."""
        counts = self._residency.take_counts()
        transfers, copy_s, disk_bytes = self._drain(phase)
        stall_s = min(self.stall_s + self._transfers.device_stall_s(), model_s)
        flat = [n for layer, hs in self._held for h in hs for n in (layer, h.expert, h.outcome)]
        requests = np.array(flat, np.int16).reshape(-1, 3)
        record = StepRecord(
            index=self._index, phase=phase, tokens=tokens, started_s=started_s - self.born_s, total_ms=model_s * 1e3,
            compute_ms=(model_s - stall_s) * 1e3, stall_ms=stall_s * 1e3, idle_ms=0.0,
            copy_ms=copy_s * 1e3, ids=self._stacked(tokens),
            layer=requests[:, 0], expert=requests[:, 1], outcome=requests[:, 2].astype(np.uint8),
            prefetch_issued=counts.issued, prefetch_used=counts.used, prefetch_late=counts.late,
            prefetch_wasted=counts.wasted, demand_bytes=counts.demand_bytes, prefetch_bytes=counts.prefetch_bytes,
            wasted_bytes=counts.wasted_bytes, disk_bytes=disk_bytes, slots=self._residency.slots, device_bytes=device_bytes,
            budget_bytes=budget_bytes, emulated=bool(self._transfers.pace), transfers=transfers, changes=changes)
        self._index += 1
        return record

    def forget(self) -> None:
        """Drop what was counted and copied so far, as if it had not happened."""
        self.begin()
        self._residency.take_counts()
        self._transfers.take_finished()

    @property
    def index(self) -> int:
        """The index the next pass will have."""
        return self._index

    def _stacked(self, tokens: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int16]]:
        if len(self._ids) != self._shape.layers:
            return np.empty((0, tokens, self._shape.top_k), np.int16)
        return np.array(self._ids, np.int16)

    def _drain(self, phase: Phase) -> tuple[tuple[Transfer, ...], float, int]:
        """Copies that finished since the last pass, how long the link was busy with them, what was read from disk."""
        born_s, experts, finished = self.born_s, self._shape.experts, self._transfers.take_finished()
        done = [Transfer(*divmod(t.eid, experts), t.bytes, t.demand, t.submitted_s - born_s, t.started_s - born_s,
                         t.landed_s - born_s, phase, "disk" if t.disk_bytes else "host") for t in finished]
        return tuple(done) if self.enabled else (), _busy_s(done), sum(t.disk_bytes for t in finished)


def _busy_s(copies: Sequence[Transfer]) -> float:
    """Seconds in which at least one copy was under way: several may be at once."""
    busy_s = end_s = 0.0
    for copy in sorted(copies, key=lambda c: c.started_s):
        busy_s += max(0.0, copy.ended_s - max(copy.started_s, end_s))
        end_s = max(end_s, copy.ended_s)
    return busy_s
