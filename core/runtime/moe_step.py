"""One MoE layer from start to end: fetches the experts that the router chose, computes them and records the step.

This function replaces transformers' experts module. It receives (hidden [T, H], ids [T, k], weights [T, k]) after the
model's own router and returns [T, H].
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from core.cache.expert_cache import ExpertCache
from core.cache.lease import Lease, LeasedExpert
from core.cache.waves import in_waves
from core.hf.adapters.marks import IDLE
from core.memory.codec import Codec
from core.memory.codec.kernels import make_kernels, say_unavailable
from core.memory.transfer import TransferEngine
from core.policy.predict import Guess
from core.prediction.predictor_host import PredictorHost
from core.runtime.compute import ExpertMath
from core.runtime.kernel_trial import objection
from core.runtime.recorder import Recorder
from core.runtime.routed import NOTHING, Routed, distinct
from core.runtime.row_places import Places
from core.runtime.stacking import worth_stacking
from core.types import Outcome

if TYPE_CHECKING:
    from core.runtime.miss import MissPolicy


class MoEStep:
    """All MoE layers of one model. `predictor_host` predicts what to prefetch."""

    def __init__(
        self,
        experts: Sequence[Any],
        codec: Codec,
        expert_cache: ExpertCache,
        transfers: TransferEngine,
        recorder: Recorder,
        predictor_host: PredictorHost,
        top_k: int,
    ) -> None:
        kernels = make_kernels(codec)
        self._math = [ExpertMath(module, codec, kernels) for module in experts]
        placed = self._math[0].needs_places()
        for math in self._math:
            math.placed = placed
        self._expert_cache, self._transfers, self._recorder = expert_cache, transfers, recorder
        self._predictor_host, self._top_k = predictor_host, top_k
        self._idle = any(getattr(module, IDLE, False) for module in experts)
        self._last = expert_cache.experts  # sort key of pairs that are not computed
        self.miss: MissPolicy | None = None  # handles misses; None: always wait

    def stack_if_worth_it(self, hidden: int, dtype: torch.dtype) -> None:
        """Try with resident experts whether one stacked product per token pays off, or whether the grouped kernels are
        correct here."""
        slots = self._expert_cache.sample(self._top_k)
        if self._math[0].grouped is not None:
            if slots and (reason := objection(self._math[0], slots, hidden, dtype)):
                say_unavailable(reason)
                for math in self._math:
                    math.grouped = None
            return
        if self._math[0].stack:
            return
        stack = worth_stacking(self._math[0], slots, hidden, dtype)
        for math in self._math:
            math.stack = stack

    def tap(self, tell: Callable[[torch.Tensor], None] | None) -> None:
        """Set a callback that gets every layer's pairs: [T * k, H], each expert's output before its weight. None
        removes it."""
        for math in self._math:
            math.tap = tell

    def __call__(self, layer: int, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        asked: list[list[int]] = ids.tolist()  # the layer's only synchronisation with the device
        if self.miss is not None and self.miss.active:
            routed = self.miss.route(layer, ids, weights, asked)
        else:
            routed = Routed(ids, weights, asked, distinct(asked), asked)
            if self._idle and len(asked) > 1:  # with one token, each expert is computed once anyway
                routed = routed.without_idle()
        if self._expert_cache.expects:
            self._expert_cache.arrive(layer, routed.wanted)
        return (self._decode if len(asked) == 1 else self._prefill)(layer, hidden, routed)

    def _decode(self, layer: int, hidden: torch.Tensor, routed: Routed) -> torch.Tensor:
        """One token: computes all ready experts at once, then each missing expert as it lands."""
        lease = self._expert_cache.acquire(layer, routed.wanted)
        self._look_ahead(layer, routed)
        math, order = self._math[layer], routed.chosen[0]
        ready = [held for held in lease.held if held.ticket is None]
        places = _places(order, ready) if math.placed else None
        rows = math.token([held.slot for held in ready], hidden, places) if ready else hidden[:0]
        if len(ready) < len(order):
            late = [held for held in lease.held if held.ticket is not None]
            outs = [rows]
            for held in late:
                self._await(held)
                outs.append(math.token([held.slot], hidden, _places(order, [held]) if math.placed else None))
            at = {held.expert: i for i, held in enumerate(ready + late)}
            landed = torch.cat([*outs, torch.zeros_like(hidden)]) if NOTHING in order else torch.cat(outs)
            rows = torch.stack([landed[at.get(expert, -1)] for expert in order])  # avoids copying indices to the device
        result = math.combine(rows, routed.weights, hidden.dtype)
        self._recorder.layer(layer, routed.asked, routed.requests(lease.held))
        self._release(lease)
        return result

    def _prefill(self, layer: int, hidden: torch.Tensor, routed: Routed) -> torch.Tensor:
        """Many tokens, grouped by expert; in waves when they need more experts than there are slots."""
        math, wanted, (tokens, k) = self._math[layer], routed.wanted, routed.ids.shape
        nothing = any(NOTHING in row for row in routed.chosen) if routed.chosen is not routed.asked else False
        flat = routed.ids.reshape(-1)
        sorted_ids, order = torch.sort(flat.masked_fill(flat == NOTHING, self._last) if nothing else flat)
        grouped = hidden[order // k]  # [T * k, H], ordered by expert, dropped pairs last
        ends = torch.bincount(sorted_ids, minlength=self._last).cumsum(0).tolist()
        rows = {e: slice(ends[e - 1] if e else 0, ends[e]) for e in wanted}
        out = torch.zeros_like(grouped) if nothing else torch.empty_like(grouped)
        held: list[LeasedExpert] = []
        for lease in in_waves(
            self._expert_cache, layer, wanted, self._release, lambda: self._look_ahead(layer, routed)
        ):
            ready_first = sorted(lease.held, key=lambda h: h.ticket is not None)
            for some in math.batches(ready_first, rows, tokens):
                for one in some:
                    self._await(one)
                if nothing:
                    some = [one for one in some if rows[one.expert].stop > rows[one.expert].start]
                if some:
                    math.many([one.slot for one in some], [rows[one.expert] for one in some], grouped, out)
            held += lease.held
        self._recorder.layer(layer, routed.asked, routed.requests(held))
        restored = torch.empty_like(out)
        restored[order] = out
        return math.combine(restored, routed.weights, hidden.dtype)

    def begin(self, tokens: Sequence[int]) -> None:
        """Start a pass over `tokens`: prefetches what the predictor names before the first routing."""
        if self._recorder.capture is not None:
            self._recorder.capture.read(tokens)
        if self._predictor_host.predictor.looks and not self._recorder.throttle.paused:
            began_s = time.perf_counter()
            guesses = self._predictor_host.begin(tokens)
            if self._predictor_host.predictor.starts:
                self._fetch(guesses, -1)
            self._recorder.prefetch_cost.predict_s += time.perf_counter() - began_s

    def _look_ahead(self, layer: int, routed: Routed) -> None:
        paused = self._recorder.throttle.paused
        if self._predictor_host.predictor.looks and (self._predictor_host.remembers or not paused):
            began_s = time.perf_counter()
            guesses = self._predictor_host.look(layer, *routed.shown)
            if not paused:
                self._fetch(guesses, layer)
            self._recorder.prefetch_cost.predict_s += time.perf_counter() - began_s

    def _fetch(self, guesses: Sequence[Guess], at: int) -> None:
        if self._recorder.capture is not None:
            self._recorder.capture.name(at, guesses)
        self._expert_cache.prefetch(guesses, at)

    def _await(self, held: LeasedExpert) -> None:
        if held.ticket is not None:
            waited_s = self._transfers.wait(held.ticket)
            self._recorder.stall_s += waited_s
            if held.outcome == Outcome.LATE:
                self._recorder.prefetch_cost.late_s += waited_s

    def _release(self, lease: Lease) -> None:
        self._expert_cache.release(lease, self._transfers.fence())


def _places(order: Sequence[int], some: Sequence[LeasedExpert]) -> Places | None:
    """The rows where one token's pairs are when sorted by expert, as in transformers' grouped_mm."""
    ranked = sorted(order)
    if any(held.expert not in ranked for held in some):
        return None  # not the router's choice
    return Places([ranked.index(held.expert) for held in some], len(ranked))
