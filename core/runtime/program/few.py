"""The experts of a few rows in the fast arithmetic.

Where every expert is in a slot, they are one native call with their sum, or steps of a program that follow the layer's
router. Otherwise the experts that are computed together are one call, and the sum is another. The outputs have the same
bits either way.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

import torch

from core.cache.lease import LeasedSegment
from core.runtime.expert_math import ExpertMath, Tap
from core.runtime.product import Product, resident_first
from core.runtime.program.experts import FastMath
from core.runtime.program.row_steps import RowSteps
from core.runtime.rows import NOTHING, Routed


class SlotsOf:
    """The addresses of the slots of a layer's experts, whose blocks come in order, as several leased segments."""

    def __init__(self, blocks: int) -> None:
        self._blocks = blocks
        self._found: dict[int, list[int]] = {}

    def until(self, one: LeasedSegment) -> list[int]:
        """Those of an expert's blocks until the last one of this segment."""
        slots = [slot.at for slot in one.slots]
        if len(slots) == self._blocks:
            return slots
        found = self._found.setdefault(one.expert, [])
        assert len(found) == one.segment.blocks.start
        found += slots
        return found

    def all_of(self, one: LeasedSegment) -> list[int]:
        """The same; none until all blocks are there."""
        found = self.until(one)
        return found if len(found) == self._blocks else []


class FewRows:
    """As `core.runtime.rows.ExpertRows` for a few rows, in the fast arithmetic."""

    def __init__(self, math: ExpertMath, product: Product, hidden: torch.Tensor, routed: Routed) -> None:
        """`hidden` [T, H]: the states that `routed` sends to experts."""
        self._rows, self._dtype = row_steps(math, *routed.weights.shape), hidden.dtype
        self._rows.x.copy_(hidden)
        self._rows.weights.copy_(routed.weights)
        self._chosen = routed.weights.shape[1]
        self._pairs: dict[int, list[int]] = {}  # of each expert: row * k + place
        for row, experts in enumerate(routed.chosen):
            for pair, expert in enumerate(experts, row * self._chosen):
                self._pairs.setdefault(expert, []).append(pair)
        self._pairs.pop(NOTHING, None)
        self._places = array("q", [NOTHING]) * routed.weights.numel()  # of each pair's output
        self._done, self._prepared, self._summed = 0, False, False
        self._slots = SlotsOf(self._rows.blocks)

    def batches(self, segments: Sequence[LeasedSegment]) -> Iterable[Sequence[LeasedSegment]]:
        """Resident experts, or what is resident of them, then the others, to be computed as they land."""
        return resident_first(segments, {}, 1, late_together=True)

    def compute(self, batch: Sequence[LeasedSegment]) -> None:
        """Compute experts that are in their slots. What is there of another is computed at once, of one row."""
        slots, counts, rows, done = list[int](), list[int](), list[int](), self._done
        parts = list[LeasedSegment]()
        blocks = self._rows.blocks
        if len(self._rows.x) == 1 and len(batch) == self._chosen and all(len(one.slots) == blocks for one in batch):
            self._compute_whole(batch)
            return
        for one in batch:
            pairs = self._pairs.get(one.expert)
            if pairs and len(one.slots) < blocks and len(self._rows.x) == 1:
                parts.append(one)
            elif pairs and (found := self._slots.all_of(one)):
                slots += found
                counts.append(len(pairs))
                rows += [pair // self._chosen for pair in pairs]
                self._place(pairs)
        if slots:
            self._rows.compute(slots, counts, rows, done, prepare=not self._prepared)
            self._prepared = True
        for one in parts:
            self._compute_part(one)

    def _compute_whole(self, batch: Sequence[LeasedSegment]) -> None:
        """Compute the only row with all of its experts, and their sum."""
        ordered = sorted(batch, key=lambda one: self._pairs[one.expert])
        self._rows.whole.run([slot.at for one in ordered for slot in one.slots])
        self._places, self._summed = array("q", range(self._chosen)), True

    def _compute_part(self, one: LeasedSegment) -> None:
        pairs, first = self._pairs[one.expert], one.segment.blocks.start
        if not first:
            self._place_once(pairs)
        slots = self._slots.until(one)
        self._rows.compute_part(slots, first, self._places[pairs[0]], prepare=not self._prepared)
        self._prepared = True

    def join(self, experts: Sequence[int], out: torch.Tensor) -> None:
        """Take the outputs [experts, H], fp32, of the only row through experts that were computed elsewhere."""
        assert len(self._rows.x) == 1, "several rows are computed on the device"
        self._rows.out[self._done : self._done + len(experts)].copy_(out)
        for expert in experts:
            self._place_once(self._pairs[expert])

    def _place(self, pairs: Sequence[int]) -> None:
        """The outputs of these pairs come next."""
        for pair in pairs:
            self._places[pair] = self._done
            self._done += 1

    def _place_once(self, pairs: Sequence[int]) -> None:
        """One output comes next: of all these pairs of the only row, which has the expert more than once where it
        stands for identity experts (LongCat-Flash)."""
        for pair in pairs:
            self._places[pair] = self._done
        self._done += 1

    def combined(self, tap: Tap | None = None) -> torch.Tensor:
        """[T, H] the layer's output, valid until the next call; `tap` gets the experts' outputs [T * k, H] before their
        weights."""
        if tap is not None:
            tap(in_order(torch.tensor(self._places), self._rows.out))
        if not self._summed:
            self._rows.sum.run(self._places)
        return self._rows.total.to(self._dtype)


def in_order(places: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """The outputs [done, H] pair by pair, 0 where there is none."""
    return torch.where((places >= 0)[:, None], out[places.clamp(min=0)], 0.0)


def row_steps(math: ExpertMath, count: int, chosen: int) -> RowSteps:
    """Those of passes over so many rows, which the layers of a model share."""
    assert isinstance(math, FastMath)
    kept = math.kernels.few
    if (count, chosen) not in kept:
        with torch.inference_mode(False):
            kept[count, chosen] = RowSteps(math.kernels, count, chosen)
    return kept[count, chosen]


def fast_all_hits(
    math: ExpertMath,
    segments: Sequence[LeasedSegment],
    hidden: torch.Tensor,
    order: Sequence[int],
    weights: torch.Tensor,
    tap: Tap | None = None,
) -> torch.Tensor:
    """As `core.runtime.rows.compute_all_hits`; valid until the next call."""
    row = row_steps(math, 1, len(segments))
    row.x.copy_(hidden)
    row.weights.copy_(weights)
    row.whole.run([slot.at for one in segments for slot in one.slots])
    if tap is not None:
        tap(row.out)
    return row.total.to(hidden.dtype)
