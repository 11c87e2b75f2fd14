"""One MoE layer, top to bottom: what the router chose is fetched, computed and recorded.

This is the function that stands in for transformers' experts. It receives (hidden [T, H], ids [T, k], weights [T, k])
after the model's own router and returns [T, H].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from core.memory.codec import Codec
from core.memory.codec.kernels import make_kernels, say_unavailable
from core.memory.transfer import TransferEngine
from core.policy.predict import Predictor
from core.policy.slots import waves
from core.runtime.compute import ExpertMath
from core.runtime.lease import Held, Lease
from core.runtime.recorder import Recorder
from core.runtime.residency import Residency
from core.runtime.stacking import worth_stacking
from core.runtime.trial import objection


class View:
    """What a predictor may look at (core.policy.predict.base.View): this layer's choice, the next layer's router."""

    def __init__(self, layer: int, layers: int, experts: int, top_k: int, request: int, ids: Sequence[Sequence[int]],
                 probe: Callable[[int], torch.Tensor]) -> None:
        self.layer, self.layers, self.experts, self.top_k = layer, layers, experts, top_k
        self.request, self.ids = request, ids
        self._probe = probe

    def gate(self, layer: int) -> npt.NDArray[np.float32]:
        scores: npt.NDArray[np.float32] = self._probe(layer).sum(0).cpu().numpy()
        return scores


class MoEStep:
    """All MoE layers of one model. `probe(at, of)` asks the router of layer `of` with layer `at`'s router input."""

    def __init__(self, experts: Sequence[Any], codec: Codec, residency: Residency, transfers: TransferEngine,
                 recorder: Recorder, probe: Callable[[int, int], torch.Tensor], top_k: int) -> None:
        kernels = make_kernels(codec)
        self._math = [ExpertMath(module, codec, kernels) for module in experts]
        self._residency, self._transfers, self._recorder = residency, transfers, recorder
        self._probe, self._top_k = probe, top_k
        self.predictor: Predictor | None = None
        self.request = 0                                           # prompts so far

    def stack_if_worth_it(self, hidden: int, dtype: torch.dtype) -> None:
        """Try, with the experts that are resident, whether a token's experts are best computed in one product, or
        whether the kernels that compute them together are right here."""
        slots = self._residency.sample(self._top_k)
        if self._math[0].grouped is not None:
            if slots and (reason := objection(self._math[0], slots, hidden, dtype)):
                say_unavailable(reason)
                for math in self._math:
                    math.grouped = None
            return
        stack = worth_stacking(self._math[0], slots, hidden, dtype)
        for math in self._math:
            math.stack = stack

    def __call__(self, layer: int, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        chosen: list[list[int]] = ids.tolist()                     # the layer's only sync with the device
        wanted = chosen[0] if len(chosen) == 1 else sorted({e for row in chosen for e in row})
        if self._residency.expects:
            self._residency.arrive(layer, wanted)
        compute = self._decode if len(chosen) == 1 else self._prefill
        return compute(layer, hidden, ids, weights, chosen, wanted)

    def _decode(self, layer: int, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor,
                chosen: list[list[int]], wanted: list[int]) -> torch.Tensor:
        """One token: what is ready first, all at once; then each missing expert as it lands."""
        lease = self._residency.acquire(layer, wanted)
        self._look_ahead(layer, chosen)
        math, order = self._math[layer], chosen[0]
        ready = [held for held in lease.held if held.ticket is None]
        rows = math.token([held.slot for held in ready], hidden) if ready else hidden[:0]
        if len(ready) < len(order):
            late = [held for held in lease.held if held.ticket is not None]
            outs = [rows]
            for held in late:
                self._await(held)
                outs.append(math.token([held.slot], hidden))
            at = {held.expert: i for i, held in enumerate(ready + late)}
            landed = torch.cat(outs)
            rows = torch.stack([landed[at[expert]] for expert in order])  # without a copy of indices to the device
        result = math.combine(rows, weights, hidden.dtype)
        self._recorder.layer(layer, chosen, lease.held)
        self._release(lease)
        return result

    def _prefill(self, layer: int, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor,
                 chosen: list[list[int]], wanted: list[int]) -> torch.Tensor:
        """Many tokens, grouped by expert; in waves when they need more experts than there are slots."""
        math, k = self._math[layer], ids.shape[1]
        sorted_ids, order = torch.sort(ids.reshape(-1))
        grouped = hidden[order // k]                               # [T * k, H], expert by expert
        ends = torch.bincount(sorted_ids, minlength=max(wanted) + 1).cumsum(0).tolist()
        rows = {e: slice(ends[e - 1] if e else 0, ends[e]) for e in wanted}
        out = hidden.new_empty(grouped.shape)
        held: list[Held] = []
        for lease in self._leases(layer, wanted, chosen):
            ready_first = sorted(lease.held, key=lambda h: h.ticket is not None)
            for some in math.batches(ready_first, rows, len(chosen)):
                for one in some:
                    self._await(one)
                math.many([one.slot for one in some], [rows[one.expert] for one in some], grouped, out)
            held += lease.held
        self._recorder.layer(layer, chosen, held)
        restored = torch.empty_like(out)
        restored[order] = out
        return math.combine(restored, weights, hidden.dtype)

    def _leases(self, layer: int, wanted: list[int], chosen: list[list[int]]) -> Iterator[Lease]:
        """Lease all of `wanted`, in waves when they do not fit: while one computes, the next one's experts arrive."""
        capacity, base = self._residency.pool(layer).capacity, layer * self._residency.experts
        groups = waves(wanted, capacity, lambda expert: self._residency.is_resident(base + expert))
        lease: Lease | None = self._residency.acquire(layer, groups[0])
        for i in range(len(groups)):
            last, room = i + 1 == len(groups), capacity > 1
            following = None if last or not room else self._residency.acquire(layer, groups[i + 1])
            if last:
                self._look_ahead(layer, chosen)
            assert lease is not None
            yield lease
            self._release(lease)
            lease = following or (None if last else self._residency.acquire(layer, groups[i + 1]))

    def _look_ahead(self, layer: int, chosen: list[list[int]]) -> None:
        if self.predictor is not None and self.predictor.looks:
            view = View(layer, len(self._math), self._residency.experts, self._top_k, self.request, chosen,
                        lambda of: self._probe(layer, of))
            self._residency.prefetch(self.predictor.predict(view))

    def _await(self, held: Held) -> None:
        if held.ticket is not None:
            self._recorder.stall_s += self._transfers.wait(held.ticket)

    def _release(self, lease: Lease) -> None:
        self._residency.release(lease, self._transfers.fence())
