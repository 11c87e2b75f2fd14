"""What a layer's experts make of its tokens, gathered in whatever order they are computed.

Both classes give segments to compute together (`batches`), take them as they land (`compute`), and return the layer's
output in the order of additions that transformers uses (`combined`). An expert is one segment, which is all of it, or
in a prompt several that are computed together; `core.runtime.split_rows` has what a token's blocks are added up in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Protocol

import numpy as np
import torch

from core.cache.lease import LeasedSegment
from core.memory.slot import Slot
from core.runtime.compute import ExpertMath, by_expert
from core.runtime.routed import NOTHING, Routed
from core.runtime.row_places import Places

Tap = Callable[[torch.Tensor], None]


class Rows(Protocol):
    """What a processor needs of a layer's rows: `TokenRows` or `PromptRows`."""

    def batches(self, segments: Sequence[LeasedSegment]) -> Iterable[Sequence[LeasedSegment]]: ...
    def compute(self, some: Sequence[LeasedSegment]) -> None: ...


class TokenRows:
    """One token's state [1, H] through its experts: all resident ones at once, then each missing one. Of experts in
    blocks, each alone."""

    __slots__ = ("_experts", "_hidden", "_math", "_order", "_outs", "_weights")

    def __init__(self, math: ExpertMath, hidden: torch.Tensor, routed: Routed) -> None:
        self._math, self._hidden, self._weights = math, hidden, routed.weights
        self._order = routed.chosen[0]
        self._experts: list[int] = []  # computed so far
        self._outs: list[torch.Tensor] = []  # [n, H] each; their rows are in the order of `_experts`

    def batches(self, segments: Sequence[LeasedSegment]) -> Sequence[Sequence[LeasedSegment]]:
        """Split segments into those that are computed together, resident ones first."""
        return resident_first(segments, self._hidden) if self._math.joined is None else by_expert(segments)

    def compute(self, some: Sequence[LeasedSegment]) -> None:
        """Compute segments whose blocks are in their slots."""
        joined = self._math.joined
        if joined is None:
            experts, slots, placed = [one.expert for one in some], [one.slots[0] for one in some], self._math.placed
        else:
            experts, slots, placed = [some[0].expert], [slot for one in some for slot in one.slots], joined.whole.placed
        places = _places(self._order, experts) if placed else None
        self._outs.append(self._math.token(slots, self._hidden, places))
        self._experts += experts

    def combined(self, tap: Tap | None = None) -> torch.Tensor:
        """[1, H] the layer's output; `tap` gets the experts' outputs [k, H] before their weights."""
        if self._experts == self._order and len(self._outs) == 1:  # else e.g. late ones came before missing ones
            rows = self._outs[0]
        else:
            at = {expert: i for i, expert in enumerate(self._experts)}
            nothing = [torch.zeros_like(self._hidden)] if NOTHING in self._order else []
            landed = torch.cat([*self._outs, *nothing])
            # row by row, which copies no indices to the device
            rows = torch.stack([landed[at.get(expert, -1)] for expert in self._order])
        return self._math.combine(rows, self._weights, self._hidden.dtype, tap)


def token_at_rest(
    math: ExpertMath,
    segments: Sequence[LeasedSegment],
    hidden: torch.Tensor,
    order: Sequence[int],
    weights: torch.Tensor,
    tap: Tap | None = None,
) -> torch.Tensor:
    """[1, H], what `TokenRows` gives of whole experts that are all in their slots, in the router's `order`: nothing has
    to be gathered."""
    out = math.token([one.slots[0] for one in segments], hidden, _places(order, order) if math.placed else None)
    return math.combine(out, weights, hidden.dtype, tap)


class PromptRows:
    """The states of many tokens [T, H], sorted by expert, through all their experts. An expert's rows are gathered when
    it is computed, and its outputs go to the places of their pairs at once, so that only these are held for the whole
    layer."""

    def __init__(self, math: ExpertMath, hidden: torch.Tensor, routed: Routed) -> None:
        self._math, self._weights, self._hidden = math, routed.weights, hidden
        self._tokens, k = routed.ids.shape
        last = max(routed.wanted, default=-1) + 1  # sort key of pairs that are not computed
        changed = routed.chosen is not routed.asked
        self._partial = changed and any(NOTHING in row for row in routed.chosen)
        flat = routed.ids.reshape(-1)
        sorted_ids, pairs = torch.sort(flat.masked_fill(flat == NOTHING, last) if self._partial else flat)
        counts = _counts(sorted_ids, routed.chosen, last)
        ends = [*accumulate(counts)]
        self._rows = {e: slice(ends[e] - counts[e], ends[e]) for e in routed.wanted}
        self._total = len(pairs)
        self._pairs, self._token_of = pairs.split(counts), (pairs // k).split(counts)  # by expert
        make = hidden.new_zeros if self._partial else hidden.new_empty
        self._out = make(self._tokens * k, hidden.shape[1])  # ordered by token; dropped pairs are zero

    def batches(self, segments: Sequence[LeasedSegment]) -> Iterable[Sequence[LeasedSegment]]:
        """Split segments into those that are computed together, resident ones first."""
        return self._math.batches(segments, self._rows, self._tokens)

    def compute(self, some: Sequence[LeasedSegment]) -> None:
        """Compute segments whose blocks are in their slots."""
        rows = self._rows
        if self._partial:  # an expert whose pairs were all dropped has no rows
            some = [one for one in some if rows[one.expert].stop > rows[one.expert].start]
        if some:
            self._computed(some)

    def _computed(self, some: Sequence[LeasedSegment]) -> None:
        experts = dict.fromkeys([one.expert for one in some])
        x = self._hidden.index_select(0, _joined([self._token_of[expert] for expert in experts]))
        places = [self._rows[expert] for expert in experts]
        outs = self._math.many([slot for one in some for slot in one.slots], places, x, self._total)
        self._out.index_copy_(0, _joined([self._pairs[expert] for expert in experts]), outs)

    def combined(self, tap: Tap | None = None) -> torch.Tensor:
        """[T, H] the layer's output; `tap` gets the experts' outputs [T * k, H] before their weights."""
        return self._math.combine(self._out, self._weights, self._hidden.dtype, tap)


def _counts(ids: torch.Tensor, chosen: Sequence[Sequence[int]], last: int) -> list[int]:
    """Pairs of each expert in `ids`; those that are not computed count as `last`'s. The host has the same ids in
    `chosen`, so that a GPU is not waited for."""
    if ids.device.type == "cpu":
        counts: list[int] = torch.bincount(ids, minlength=last).tolist()
    else:
        of = np.array(chosen, np.int64).reshape(-1)
        counts = np.bincount(np.where(of == NOTHING, last, of), minlength=last).tolist()
    return counts


class PairRows(PromptRows):
    """The next tokens of several sequences [T, H]: few rows an expert. All resident experts are computed at once, row
    by row, then each missing one as it lands."""

    def batches(self, segments: Sequence[LeasedSegment]) -> Iterable[Sequence[LeasedSegment]]:
        return resident_first(segments, self._hidden)

    def _computed(self, some: Sequence[LeasedSegment]) -> None:
        """Rows of one expert are multiplied together, as many at once as there are kernels for, so that its weights are
        read once."""
        most = self._math.rows_at_once
        runs: dict[int, list[Slot]] = {}  # by the number of rows
        parts: dict[int, list[tuple[int, slice]]] = {}  # whose these are
        for one in some:
            places = self._rows[one.expert]
            full, rest = divmod(places.stop - places.start, most)
            for count, times, at in ((most, full, 0), (rest, 1, full * most)):
                if count and times:
                    runs.setdefault(count, []).extend([one.slots[0]] * times)
                    parts.setdefault(count, []).append((one.expert, slice(at, at + count * times)))
        every = [part for count in runs for part in parts[count]]
        x = self._hidden.index_select(0, _joined([self._token_of[expert][at] for expert, at in every]))
        outs = self._math.pairs(list(runs.items()), x)
        self._out.index_copy_(0, _joined([self._pairs[expert][at] for expert, at in every]), outs)


def resident_first(segments: Sequence[LeasedSegment], hidden: torch.Tensor) -> Sequence[Sequence[LeasedSegment]]:
    """All segments without a copy to wait for, then each of the others; on the GPU of `hidden` all of the others, where
    a launch takes longer than an expert."""
    resident = [one for one in segments if one.ticket is None]
    if len(resident) == len(segments):
        return (resident,) if resident else ()
    missing = [one for one in segments if one.ticket is not None]
    late = [missing] if hidden.device.type == "cuda" else [[one] for one in missing]
    return [resident, *late] if resident else late


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _places(order: Sequence[int], experts: Sequence[int]) -> Places | None:
    """The rows where one token's pairs are when sorted by expert, as in transformers' grouped_mm."""
    ranked = sorted(order)
    if any(expert not in ranked for expert in experts):
        return None  # not the router's choice
    return Places([ranked.index(expert) for expert in experts], len(ranked))
