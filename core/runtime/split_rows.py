"""What a layer's experts make of a token where they are computed in blocks: an expert's output is the sum of theirs.

Blocks are added in fp32, in their order, and the sum is rounded once. As an expert's first blocks are always computed
before the others, no bit of a layer's output depends on how many of them were resident (MoEpic section 3.1).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from core.cache.lease import LeasedSegment
from core.runtime.compute import ExpertMath
from core.runtime.expert_rows import Tap, resident_first
from core.runtime.routed import Routed


class SplitTokenRows:
    """One token's state [1, H] through blocks of its experts: all resident ones at once, then each segment that is
    missing."""

    __slots__ = ("_hidden", "_math", "_order", "_row", "_sums", "_weights")

    def __init__(self, math: ExpertMath, hidden: torch.Tensor, routed: Routed) -> None:
        self._math, self._hidden, self._weights = math, hidden, routed.weights
        self._order = routed.chosen[0]
        self._row = {expert: row for row, expert in enumerate(dict.fromkeys(self._order))}
        shape = len(self._row), hidden.shape[1]
        self._sums = torch.zeros(shape, dtype=torch.float32, device=hidden.device)  # what is not computed stays 0

    def batches(self, segments: Sequence[LeasedSegment]) -> Sequence[Sequence[LeasedSegment]]:
        """Split segments into those that are computed together, resident ones first."""
        return resident_first(segments, self._hidden)

    def compute(self, some: Sequence[LeasedSegment]) -> None:
        """Compute segments whose blocks are in their slots."""
        outs = self._math.blocks([slot for one in some for slot in one.slots], self._hidden)
        rows = [self._row[one.expert] for one in some for _ in one.slots]
        if outs.device.type == "cpu":  # one after the other
            self._sums.index_add_(0, torch.tensor(rows), outs)
        else:
            for row, block in zip(rows, outs.unbind(), strict=True):
                self._sums[row] += block

    def combined(self, tap: Tap | None = None) -> torch.Tensor:
        """[1, H] the layer's output; `tap` gets the experts' outputs [k, H] before their weights."""
        rows = self._sums.to(self._hidden.dtype)
        if len(self._row) < len(self._order):  # NOTHING, several times
            rows = torch.stack([rows[self._row[expert]] for expert in self._order])
        return self._math.combine(rows, self._weights, self._hidden.dtype, tap)
