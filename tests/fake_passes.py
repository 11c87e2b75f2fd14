"""Passes that nothing computed: random routing and hits from a seeded generator, and what is counted of them."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from core.engine.arithmetic import Arithmetic
from core.engine.quality.report import Quality
from core.metrics import METRICS, values
from core.metrics.limit import COLUMNS, Fewest, SpeedLimit, speed_limit
from core.profile.trace.chunk import RANKED
from core.runtime.telemetry import RING, UNFETCHED
from core.settings.loading import LoadSpec
from core.settings.pins import Pins
from core.types import AnswerStats, Frame, Memory, Outcome, Residence, StepRecord, Transfer
from tests import fake_lossy
from tests.fake_models import MB, SHAPE, is_pack

PAGE = 4096


class FakePasses:
    """Of a pack (a folder with moestro.json) the upper half of each layer's experts is on disk alone, unless the whole
    of host memory was asked for."""

    closeness: float | None = 0.0
    arithmetic = Arithmetic()
    weights = ""
    busy = False

    def __init__(self, spec: LoadSpec) -> None:
        self.spec, self.shape, self.settings, self.version = spec, SHAPE, spec.settings, 0
        self.has_disk = is_pack(spec.model) and spec.host != "all"
        self._rng, self._steps, self._born = np.random.default_rng(0), list[StepRecord](), time.perf_counter()
        self._marks: list[tuple[int, str]] = []
        self._pending: dict[str, object] = {}  # settings that the next pass is the first with
        self.waiting: list[Quality] = []  # what `audit` will say, one after the other
        self._tainted = False  # something was changed before in this answer
        self.kept = {"probs": False, "ranks": False, "tokens": False}
        self._request = 0

    def _ranked(self) -> np.ndarray[Any, Any]:
        """What a predictor of all experts names in each layer for the next one: the higher the id, the likelier; none
        where the settings have no prefetcher."""
        layers = range(SHAPE.layers) if self.settings["predictor"] != "none" else range(0)
        return np.array(
            [(0, at, (at + 1) % SHAPE.layers, e, e / SHAPE.experts) for at in layers for e in range(SHAPE.experts)],
            RANKED,
        )

    def _step(self, phase: str, tokens: int) -> StepRecord:
        s, rng, now = SHAPE, self._rng, time.perf_counter() - self._born
        ids = rng.random((s.layers, tokens, s.experts)).argsort(-1)[..., : s.top_k]
        share = self.settings.cache.budget.share or 0.5
        pairs = [(layer, e) for layer in range(s.layers) for e in sorted(set(ids[layer].ravel().tolist()))]
        outcome = np.where(
            rng.random(len(pairs)) < share,
            Outcome.HIT,
            [Outcome.MISS_DISK if self.on_disk(e) else Outcome.MISS for _, e in pairs],
        ).astype(np.uint8)
        lossy = None
        if self.settings.lossy.active:
            lossy, outcome = fake_lossy.act(self.settings, s, ids, pairs, outcome, rng)
        self._tainted = lossy is not None and (self._tainted or lossy.changed > 0)
        misses = [p for p, o in zip(pairs, outcome, strict=True) if o in (Outcome.MISS, Outcome.MISS_DISK)]
        read, times = sum(self.on_disk(e) for _, e in misses), (now, now + 0.001, now + 0.002)
        step = StepRecord(
            index=len(self._steps),
            phase=phase,
            tokens=tokens,
            started_s=now,
            total_ms=20.0,
            compute_ms=12.0,  # type: ignore[arg-type]
            stall_ms=6.0,
            idle_ms=2.0,
            copy_ms=7.0,
            ids=ids.astype(np.int16),
            layer=np.array([p[0] for p in pairs], np.int16),
            expert=np.array([p[1] for p in pairs], np.int16),
            outcome=outcome,
            demand_bytes=len(misses) * s.expert_bytes,
            disk_bytes=read * -(-s.expert_bytes // PAGE) * PAGE,
            slots=int(share * s.total),
            device_bytes=self.memory().used,
            budget_bytes=self.memory().budget,
            changes=self._pending,
            ranked=self._ranked() if self.kept["ranks"] else None,
            lossy=lossy,
            exact=not self._tainted,
            rows=((self._request, tokens),),
            transfers=tuple(
                Transfer(layer, e, s.expert_bytes, True, *times, phase, "disk" if self.on_disk(e) else "host")
                for layer, e in misses
            ),
        )
        self._pending = {}
        self._steps.append(step)
        self.version += 1
        return step

    def _stats(self, prompt: int, n: int, seconds: float, every: list[StepRecord]) -> AnswerStats:
        """Of an answer of n tokens."""
        steps = [s for s in self._steps[-n:] if s.phase == "decode"]
        hits, requests = sum(s.hits for s in steps), sum(s.requests for s in steps)
        return AnswerStats(
            prompt_tokens=prompt,
            new_tokens=n,
            ttft_ms=20.0,
            tpot_ms=20.0,
            tok_s=n / seconds,
            hit_rate=hits / requests if requests else None,
            prefill_hit_rate=0.5,
            demand_bytes=sum(s.demand_bytes for s in steps),
            prefetch_bytes=0,
            wasted_bytes=0,
            disk_misses=sum(s.disk_misses for s in steps),
            disk_bytes=sum(s.disk_bytes for s in steps),
            compute_ms=12.0,
            stall_ms=6.0,
            idle_ms=2.0,
            budget_bytes=self.memory().budget,
            device_bytes_peak=self.memory().used,
            exact=all(s.exact for s in every),
            emulated=self.settings["link"] == "emulated",
            reason="length",
            changed=sum(s.changed for s in every),
            assignments=sum(s.assignments for s in every),
            closeness=self.closeness,
            **self.arithmetic.stats(),
            weights=self.weights,
            audit=self._to_score(every),
        )

    def _to_score(self, steps: list[StepRecord]) -> int:
        if not any(s.changed for s in steps) or not self.settings["quality_rate"]:
            return 0
        self.waiting.append(fake_lossy.scored(len(self._steps), steps))
        return len(self._steps)

    def on_disk(self, expert: int) -> bool:
        return self.has_disk and expert >= SHAPE.experts // 2

    def memory(self) -> Memory:
        share = self.settings.cache.budget.share or 0.5
        experts = int(share * SHAPE.total) * SHAPE.expert_bytes
        return Memory(
            dense=4 * MB,
            experts=experts,
            kv=MB // 2,
            kv_reserved=MB,
            workspace=MB,
            budget=6 * MB + experts,
            device_total=1000 * MB,
            device_free=500 * MB,
            host=SHAPE.total * SHAPE.expert_bytes // (2 if self.has_disk else 1),
            peak=6 * MB + experts,
        )

    def limit(self, fewest: Fewest | None = None, points: int = RING) -> SpeedLimit:
        tail, known = self._steps[-RING:], {one.name: one for one in METRICS}
        columns = {name: np.array(values(tail, known[name]), float) for name in COLUMNS if name in known}
        columns["index"] = np.array([one.index for one in tail], float)
        columns["decode"] = np.array([one.phase == "decode" for one in tail], float)
        columns["unfetched"] = np.array([np.isin(one.outcome, UNFETCHED).sum() for one in tail], float)
        return speed_limit(columns, fewest, SHAPE.expert_bytes, points)

    def frame(self, layer: int = 0, points: int = 240, fewest: Fewest | None = None) -> Frame:
        s, tail = SHAPE, self._steps[-points:]
        place = (self._rng.random((s.layers, s.experts)) < (self.settings.cache.budget.share or 0.5)).astype(
            np.uint8
        ) * 2
        if self.has_disk:
            upper = place[:, s.experts // 2 :]
            upper[upper == Residence.HOST] = Residence.DISK
        coactivation = np.zeros((s.experts, s.experts), np.uint32)
        for step in self._steps[-500:]:
            for row in step.ids[layer]:
                coactivation[np.ix_(row, row)] += 1
        np.fill_diagonal(coactivation, 0)

        columns = {one.name: np.array(values(tail, one), one.array) for one in METRICS if one.frame}
        columns["step"] = np.array([t.index for t in tail], np.int32)
        columns["decode"] = np.array([t.phase == "decode" for t in tail], np.uint8)
        return Frame(
            version=self.version,
            shape=s,
            busy=self.busy,
            place=place,
            hit_rate=np.full(s.layers, 0.6, np.float32),
            coactivation=coactivation,
            window=50,
            columns=columns,
            marks=list(self._marks),
            memory=self.memory(),
            tok_s=48.0,
            tpot_ms=20.8,
            hit=0.61,
            link_gbps=0.4,
            link_peak_gbps=0.6,
            link_limit_gbps=1.0,
            passes=50,
            emulated=self.settings["link"] == "emulated",
            exact=tail[-1].exact if tail else True,
            limit=self.limit(fewest, points),
            lossy=fake_lossy.seen(self.settings, s, self._steps, tail) if self.settings.lossy.active else None,
            pinned=tuple(
                layer * s.experts + expert
                for layer, expert in Pins.parse(str(self.settings["pins"])).named
                if layer < s.layers and expert < s.experts
            ),
        )
