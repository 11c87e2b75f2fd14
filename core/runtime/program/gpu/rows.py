"""The experts of a layer on a GPU in the fast arithmetic, as `core.runtime.moe_step` has them computed: residents
together, and missing ones as they land. The outputs have the same bits either way."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from core.cache.lease import LeasedSegment
from core.errors import ModelError
from core.memory.arena import Slot
from core.memory.codec import Codec
from core.memory.codec.base import Base
from core.memory.codec.fast.gpu.launch import Groups, has_tiles
from core.memory.codec.kernels import Launcher
from core.memory.codec.matrix import matrix
from core.memory.to_device import to_device
from core.runtime.expert_math import ExpertMath, Tap
from core.runtime.product import Product, resident_first
from core.runtime.program.experts import gate_of
from core.runtime.program.few import in_order
from core.runtime.program.gpu.experts import GpuExperts, Mail, Where
from core.runtime.rows import NOTHING, Routed

TILED = 8  # rows of an expert, in the mean of those chosen, from which tensor cores multiply: a quarter of a tile


class GpuMath(ExpertMath):
    """The arithmetic of one layer's experts; `ExpertMath` is the reference."""

    def __init__(self, experts: Any, codec: Codec, kernels: GpuExperts) -> None:
        self.gpu = kernels
        super().__init__(experts, codec)

    def needs_places(self) -> bool:
        return False

    @property
    def finds(self) -> bool:
        return True

    def by_ids(
        self, table: torch.Tensor, ids: torch.Tensor, hidden: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        return self.gpu.token(Where(table=table, ids=ids), hidden, weights[0].float())

    def with_host(
        self,
        mail: Mail,
        table: torch.Tensor,
        ids: torch.Tensor,
        first: int,
        hidden: torch.Tensor,
        weights: torch.Tensor,
    ) -> torch.Tensor:
        """As `by_ids`, where the host computes what has no address."""
        return self.gpu.with_host(mail, table, ids, first, hidden.contiguous(), weights[0].float())

    def in_slots(self, slots: Sequence[Slot], hidden: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        where = Where(tuple([slot.raw.data_ptr() for slot in slots]))
        return self.gpu.token(where, hidden, weights[0].float())


def gpu_experts(experts: Any, codec: Codec, launcher: Launcher) -> GpuExperts:
    """What the layers of a model on a GPU share. Raises ModelError, with the reason, where there are no kernels for
    such experts."""
    assert isinstance(codec, Base)
    if codec.blocks > 1:
        raise ModelError("on a GPU the fast arithmetic does not compute experts in several blocks")
    up, down = matrix(codec, "gate_up_proj" if experts.has_gate else "up_proj"), matrix(codec, "down_proj")
    biases = sum(one.bias is not None for one in (up, down))
    if not experts.has_gate:
        raise ModelError("on a GPU the fast arithmetic has no activation without a gate")
    if any(one.bits and one.inputs % 32 for one in (up, down)) or biases != len(codec.biases):
        raise ModelError("the fast arithmetic has no kernels for experts of this form")
    return GpuExperts(up, down, gate_of(experts, down.inputs), launcher)


class GpuRows:
    """As `core.runtime.rows.ExpertRows`."""

    def __init__(
        self, math: ExpertMath, product: Product, hidden: torch.Tensor, routed: Routed, *, keeps: bool = False
    ) -> None:
        """`hidden` [T, H]: the states that `routed` sends to experts; `keeps`: each expert's output is asked for."""
        assert isinstance(math, GpuMath)
        self._keeps = keeps
        self._experts, self._dtype = math.gpu, hidden.dtype
        self._x, self._weights = hidden.contiguous(), routed.weights.float().contiguous()
        self._chosen = np.array(routed.chosen)
        self._pairs: dict[int, list[int]] = {}  # of each expert: row * k + place
        for pair, expert in enumerate(self._chosen.ravel().tolist()):
            self._pairs.setdefault(expert, []).append(pair)
        self._pairs.pop(NOTHING, None)
        self._tiled = self._chosen.size >= TILED * len(self._pairs) and has_tiles(hidden.device)
        self._places = [NOTHING] * self._chosen.size  # of each pair's output
        self._done, self._outputs = 0, list[torch.Tensor]()
        self._total: torch.Tensor | None = None

    def batches(self, segments: Sequence[LeasedSegment]) -> Iterable[Sequence[LeasedSegment]]:
        """Residents, and then the others: a launch takes longer than an expert."""
        return resident_first(segments, {}, len(self._x), late_together=True)

    def compute(self, batch: Sequence[LeasedSegment]) -> None:
        """Compute experts that are in their slots."""
        there = [one for one in batch if one.expert in self._pairs]
        if not there:
            return
        if len(self._x) > 1:
            self._compute_rows(there)
        elif len(there) == self._chosen.size and not self._keeps:
            ordered = sorted(there, key=lambda one: self._pairs[one.expert])
            where = Where(tuple([one.slot.raw.data_ptr() for one in ordered]))
            self._total = self._experts.token(where, self._x, self._weights[0])
        else:
            outputs = self._experts.outputs_at([one.slot.raw.data_ptr() for one in there], self._x)
            self._add([one.expert for one in there], outputs)

    def _compute_rows(self, there: Sequence[LeasedSegment]) -> None:
        """Several rows: what the kernels are told of them is one copy."""
        pairs = [pair for one in there for pair in self._pairs[one.expert]]
        ends = [*accumulate((len(self._pairs[one.expert]) for one in there), initial=0)]
        parts = (
            [one.slot.raw.data_ptr() for one in there],
            [*range(len(there))],
            [p // self._chosen.shape[1] for p in pairs],
        )
        told = to_device([number for part in (*parts, ends) for number in part], self._x.device, torch.int64)
        bases, ids, rows, until = told.split([len(part) for part in (*parts, ends)])
        outputs = self._experts.outputs(Groups(bases, ids, until, rows), self._x, self._tiled)
        self._add([one.expert for one in there], outputs)

    def join(self, experts: Sequence[int], out: torch.Tensor) -> None:
        """Take the outputs [experts, H], fp32, of the only row through experts that were computed elsewhere."""
        assert len(self._x) == 1, "several rows are computed on the device"
        self._add(experts, to_device(out.clone(), self._x.device))

    def _add(self, experts: Sequence[int], outputs: torch.Tensor) -> None:
        self._outputs.append(outputs)
        for pair in (pair for expert in experts for pair in self._pairs[expert]):
            self._places[pair] = self._done
            self._done += 1

    def combined(self, tap: Tap | None = None) -> torch.Tensor:
        """[T, H] the layer's output; `tap` gets the experts' outputs [T * k, H] before their weights."""
        assert tap is None or self._keeps
        if self._total is not None:
            return self._total
        device, width = self._x.device, self._x.shape[1]
        outputs = torch.cat(self._outputs) if self._outputs else torch.zeros(1, width, device=device)
        places = to_device(self._places, device, torch.int64)
        if tap is not None:
            tap(in_order(places, outputs))
        return self._experts.summed(outputs, places.view(self._chosen.shape), self._weights, self._dtype)
