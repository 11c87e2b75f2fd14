"""Measures what placing missing experts costs on this machine: each way alone, then both at once, as tokens do it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from core.cache.expert_cache import ExpertCache
from core.cache.lease import Lease, LeasedSegment
from core.memory.store import ExpertStore
from core.policy.placement import Costs, Layer, in_place, layer_s
from core.runtime.expert_math import ExpertMath
from core.runtime.placement import LEAST_S
from core.runtime.program.experts import FastMath
from core.runtime.program.few import FewRows
from core.runtime.program.gpu.rows import GpuMath, GpuRows
from core.runtime.rows import ExpertRows, Routed
from core.types import Outcome, Segment

if TYPE_CHECKING:
    from core.runtime.host_compute import HostCompute

ROUNDS = 9  # of each measurement, after two that do not count
MOST = 8  # experts of a trial on either side


class Seen(NamedTuple):
    """Seconds of a layer: until the device had computed, of what the host computed, and of handing that over and
    taking it."""

    device_s: float
    host_s: float
    hand_s: float


class LayerTrial:
    """One layer with experts that are resident, and others that lie in host memory: those of all layers whose experts
    are held like the first one's."""

    def __init__(
        self, host: HostCompute, math: Sequence[ExpertMath], expert_cache: ExpertCache, store: ExpertStore
    ) -> None:
        """`math` of each layer."""
        self._host, self._math, self._store, self._table = host, math[0], store, expert_cache.core.table
        self.device = math[0].codec.device
        alike = [one.codec is math[0].codec for one in math]
        every = [eid for eid in range(len(self._table)) if alike[eid // expert_cache.experts]]
        there = None if (found := store.host_resident()) is None else {*found}
        pending = expert_cache.copies.tickets
        self._here = [eid for eid in every if self._table[eid] and eid not in pending]
        kept, held = [eid for eid in every if there is None or eid in there], {*self._here}
        self._hosted = [eid for eid in kept if eid not in held] or [*kept]
        self._at = 0  # each round has other experts, which no cache of the processor holds
        self.most = min(MOST, len(self._here) // 2, len(self._hosted) // 2)

    def copied_s(self) -> float:
        """In which a resident is copied into its slot once more: the least of some rounds."""
        found = list[float]()
        for eid in self._next(self._here, ROUNDS):
            began_s = time.perf_counter()
            self._store.fetch(eid, [slot.raw for slot in self._table[eid]])
            self._synchronize()
            found.append(time.perf_counter() - began_s)
        return min(found)

    def usual(self, here: int, hosted: int) -> Seen:
        """Each figure with so many experts on the device and on the host: the least but for a quarter of the rounds, as
        other programs only ever add to it."""
        rounds = [self._once(here, hosted) for _ in range(ROUNDS + 2)][2:]
        return Seen(*[sorted(of)[ROUNDS // 4] for of in zip(*rounds, strict=True)])

    @torch.inference_mode()
    def _once(self, here: int, hosted: int) -> Seen:
        host, team = self._host, self._host.team if hosted else None
        there = self._next(self._hosted, hosted)
        segments = [self._segment(at, eid) for at, eid in enumerate(self._next(self._here, here))]
        left = [self._segment(here + at, eid) for at, eid in enumerate(there)]
        rows, hidden = self._rows(here + hosted)
        host.hold(there, hosted)
        self._synchronize()
        times = [time.perf_counter()]

        def passed() -> float:
            times.append(time.perf_counter())
            return times[-1] - times[-2]

        given = host.begin(Lease(0, (), segments, segments, left), hidden)
        begun_s = passed()
        for batch in rows.batches(given):
            rows.compute(batch)
        self._synchronize()
        device_s = passed()
        if team is not None:
            team.rest()
        passed()
        took_s, _ = host.end(rows, left)
        ended_s = passed()
        hand_s = begun_s + (ended_s + team.late_s if team is not None else 0.0)
        return Seen(device_s, took_s or ended_s, hand_s)

    def _next(self, of: Sequence[int], count: int) -> list[int]:
        self._at += count
        return [of[(self._at + i) % len(of)] for i in range(count)]

    def _segment(self, label: int, eid: int) -> LeasedSegment:
        """`label` stands for the expert: those of a trial are of any layer."""
        return LeasedSegment(label, Segment(eid, range(1)), self._table[eid], Outcome.HIT, None)

    def _rows(self, experts: int) -> tuple[ExpertRows | FewRows | GpuRows, torch.Tensor]:
        math, chosen = self._math, [[*range(experts)]]
        ids = torch.tensor(chosen, device=self.device)
        hidden = torch.ones(1, math.inputs, dtype=math.codec.dtype, device=self.device)
        routed = Routed(ids, torch.ones(ids.shape, device=self.device), chosen, chosen[0], chosen)
        kind = GpuRows if isinstance(math, GpuMath) else FewRows if isinstance(math, FastMath) else ExpertRows
        return kind(math, math.token, hidden, routed), hidden

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()


def trial_costs(trial: LayerTrial, copy_s: float, threads: int) -> Costs:
    """The costs of a load. `copy_s`: of one expert, where that is known. `threads` of the host; the costs have 0 on a
    CPU whose computing threads do residents and missing experts in their turn in no more time."""
    gpu, most = trial.device.type == "cuda", trial.most
    if not most:  # nothing to try: as if each took as long as a copy
        return Costs(copy_s, 0.0, copy_s, copy_s, 0.0, copy_s, threads, gpu)
    copy_s = copy_s or trial.copied_s()
    fixed_s, device_s = line([trial.usual(n, 0).device_s for n in (1, most)], most)
    alike = in_place(Costs(copy_s, fixed_s, device_s, device_s, 0.0, device_s))
    if not threads and not gpu:
        return alike
    half = max(1, most // 2)
    both = trial.usual(half, half)
    beside_s = device_s if gpu else max(LEAST_S, (both.device_s - fixed_s) / half)
    apart = Costs(copy_s, fixed_s, device_s, beside_s, both.hand_s, both.host_s / half, threads, gpu)
    layer = Layer(half, half)
    return alike if not gpu and layer_s(alike, layer, half) <= layer_s(apart, layer, half) else apart


def line(seconds: Sequence[float], count: int) -> tuple[float, float]:
    """(fixed, each) of what takes so long for one and for `count` of them."""
    one_s, several_s = seconds
    each_s = max(LEAST_S, (several_s - one_s) / max(1, count - 1)) if count > 1 else one_s
    return max(0.0, one_s - each_s), each_s
