"""One MoE layer as (row, expert, weight) triples: each expert's rows are gathered, computed in any order, and their
outputs scattered to the triples they belong to. The weighted sum then adds in the order that transformers uses."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch

from core.cache.lease import LeasedSegment, SkippedRequest
from core.runtime.expert_math import ExpertMath, Tap
from core.runtime.product import Product
from core.runtime.row_places import Places

NOTHING = -1  # replaces the id of a dropped expert


def distinct(chosen: Sequence[Sequence[int]]) -> list[int]:
    """The distinct experts: in the token's order for one token, ascending for many."""
    found = dict.fromkeys(chosen[0]) if len(chosen) == 1 else dict.fromkeys(sorted({e for row in chosen for e in row}))
    found.pop(NOTHING, None)
    return [*found]


@dataclass(slots=True)
class Routed:
    """`ids` [T, k] to compute, `weights` [T, k], the ids as lists (`chosen`) and the distinct ones (`wanted`); `asked`
    is the router's choice, the same list as `chosen` where nothing was changed. `fates`: the router's experts that are
    not fetched."""

    ids: torch.Tensor
    weights: torch.Tensor
    chosen: list[list[int]]
    wanted: list[int]
    asked: list[list[int]]
    fates: Sequence[SkippedRequest] = ()
    executed: bool = False  # whether this is a predicted routing; later predictions then follow from it

    def without_idle(self) -> Routed:
        """A copy without pairs of weight 0, which need no computation; self if there are none. All experts are still
        requested."""
        idle = self.weights == 0
        if not bool(idle.any()):
            return self
        ids = self.ids.masked_fill(idle, NOTHING)
        return Routed(ids, self.weights, ids.tolist(), self.wanted, self.asked)

    def requests(self, leased: list[LeasedSegment]) -> Sequence[LeasedSegment | SkippedRequest]:
        """The outcome of each distinct expert that the router chose; `leased` = the requests of all leases."""
        if self.chosen is self.asked:
            return leased
        asked = set(distinct(self.asked))
        return [*(one for one in leased if one.expert in asked), *self.fates]

    @property
    def shown(self) -> tuple[list[list[int]], torch.Tensor | None]:
        """The experts and weights that predictors see: an executed prediction, else the router's choice, even where
        some of it was replaced."""
        return (self.chosen if self.executed else self.asked), self.weights


class ExpertRows:
    """The triples of one layer, computed by one `product`. `batches` divides leased segments into those that are
    computed together, `compute` takes each batch once its copies have landed, `combined` is the layer's output."""

    __slots__ = ("_math", "_product", "_triples", "_weights")

    def __init__(self, math: ExpertMath, product: Product, hidden: torch.Tensor, routed: Routed) -> None:
        """`hidden` [T, H]: the states that `routed` sends to experts."""
        self._math, self._product, self._weights = math, product, routed.weights
        self._triples = (_OneRow if len(routed.chosen) == 1 else _ManyRows)(product, hidden, routed)

    def batches(self, segments: Sequence[LeasedSegment]) -> Iterable[Sequence[LeasedSegment]]:
        """Segments that are computed together, resident ones first."""
        return self._product.batches(segments, self._triples.counts, self._triples.tokens)

    def compute(self, batch: Sequence[LeasedSegment]) -> None:
        """Compute segments whose blocks are in their slots."""
        self._triples.compute(batch)

    def join(self, experts: Sequence[int], out: torch.Tensor) -> None:
        """Take the outputs [experts, H] of the only row through experts that were computed elsewhere."""
        assert isinstance(self._triples, _OneRow), "several rows are computed here"
        self._triples.join(experts, out)

    def combined(self, tap: Tap | None = None) -> torch.Tensor:
        """[T, H] the layer's output; `tap` gets the experts' outputs [T * k, H] before their weights."""
        out, dtype = self._triples.outputs()
        return self._math.combine(out, self._weights, dtype, tap)


def compute_all_hits(
    math: ExpertMath,
    segments: Sequence[LeasedSegment],
    hidden: torch.Tensor,
    order: Sequence[int],
    weights: torch.Tensor,
    tap: Tap | None = None,
) -> torch.Tensor:
    """[1, H], what `ExpertRows` gives for one row whose experts are all resident, in the router's `order`: there is
    nothing to gather, to wait for, or to scatter."""
    product = math.token
    places = _ranks(order, order) if product.placed else None
    out = product.multiply([one.slots[0] for one in segments], hidden, None, places)
    return math.combine(out, weights, hidden.dtype, tap)


class _OneRow:
    """The triples of one row: its state is every expert's input. Outputs [n, H] are kept as they are computed, and put
    into the router's order at the end, mostly without a copy."""

    __slots__ = ("_experts", "_hidden", "_order", "_outs", "_product")

    counts: Mapping[int, int] = {}  # one row each
    tokens = 1

    def __init__(self, product: Product, hidden: torch.Tensor, routed: Routed) -> None:
        self._product, self._hidden, self._order = product, hidden, routed.chosen[0]
        self._experts: list[int] = []  # the expert of each row in `_outs`, one after the other
        self._outs: list[torch.Tensor] = []
        if product.adds:  # what is not computed stays 0
            self._experts = [*dict.fromkeys(self._order)]
            self._outs = [hidden.new_zeros(len(self._experts), hidden.shape[1], dtype=torch.float32)]

    def compute(self, batch: Sequence[LeasedSegment]) -> None:
        product, slots = self._product, [slot for one in batch for slot in one.slots]
        if product.adds:
            self._add(batch, product.multiply(slots, self._hidden, None, None))
            return
        experts = [*dict.fromkeys([one.expert for one in batch])]
        places = _ranks(self._order, experts) if product.placed else None
        self._outs.append(product.multiply(slots, self._hidden, None, places))
        self._experts += experts

    def join(self, experts: Sequence[int], out: torch.Tensor) -> None:
        self._outs.append(out.to(self._hidden.device, self._hidden.dtype))
        self._experts += experts

    def _add(self, batch: Sequence[LeasedSegment], parts: torch.Tensor) -> None:
        """Add the outputs [blocks, H] of experts' blocks, in order."""
        (sums,), row = self._outs, {expert: at for at, expert in enumerate(self._experts)}
        rows = [row[one.expert] for one in batch for _ in one.slots]
        if parts.device.type == "cpu":  # one after the other
            sums.index_add_(0, torch.tensor(rows), parts)
        else:
            for at, part in zip(rows, parts.unbind(), strict=True):
                sums[at] += part

    def outputs(self) -> tuple[torch.Tensor, torch.dtype]:
        dtype = self._hidden.dtype
        if self._experts == self._order and len(self._outs) == 1:
            return self._outs[0].to(dtype), dtype
        at = {expert: i for i, expert in enumerate(self._experts)}
        nothing = [torch.zeros_like(self._hidden)] if NOTHING in self._order and NOTHING not in at else []
        landed = torch.cat([*self._outs, *nothing]).to(dtype)
        # row by row, which copies no indices to the device
        return torch.stack([landed[at.get(expert, -1)] for expert in self._order]), dtype


class _ManyRows:
    """The triples of many rows, sorted by expert. An expert's states are gathered when it is computed, and its outputs
    scattered at once, so that only these are held for the whole layer."""

    def __init__(self, product: Product, hidden: torch.Tensor, routed: Routed) -> None:
        self._product, self._hidden = product, hidden
        self.tokens, k = routed.ids.shape
        last = max(routed.wanted, default=-1) + 1  # sort key of triples that are not computed
        changed = routed.chosen is not routed.asked
        dropped = changed and any(NOTHING in row for row in routed.chosen)
        flat = routed.ids.reshape(-1)
        sorted_ids, triples = torch.sort(flat.masked_fill(flat == NOTHING, last) if dropped else flat)
        counts = _counts(sorted_ids, routed.chosen, last)
        self.counts: dict[int, int] = {expert: counts[expert] for expert in routed.wanted}
        self._starts, self._total = [0, *accumulate(counts)], len(flat)
        self._triples, self._rows = triples.split(counts), (triples // k).split(counts)  # by expert
        make = hidden.new_zeros if dropped else hidden.new_empty  # an output that is not computed is 0
        self._out = make(len(flat), hidden.shape[1])  # ordered by row

    def compute(self, batch: Sequence[LeasedSegment]) -> None:
        batch = [one for one in batch if self.counts[one.expert]]  # the others' triples were all dropped
        if not batch:
            return
        experts = [*dict.fromkeys([one.expert for one in batch])]
        slots, counts = [slot for one in batch for slot in one.slots], [self.counts[expert] for expert in experts]
        rows, triples = [self._rows[expert] for expert in experts], [self._triples[expert] for expert in experts]
        x = self._hidden.index_select(0, _joined(rows))
        places = self._consecutive(experts) if self._product.placed else None
        self._out.index_copy_(0, _joined(triples), self._product.multiply(slots, x, counts, places))

    def _consecutive(self, experts: Sequence[int]) -> Places:
        """Where the rows of an expert are among all triples, sorted by expert."""
        (expert,) = experts  # they are computed one at a time
        start = self._starts[expert]
        return Places(range(start, start + self.counts[expert]), self._total)

    def outputs(self) -> tuple[torch.Tensor, torch.dtype]:
        return self._out, self._hidden.dtype


def _counts(ids: torch.Tensor, chosen: Sequence[Sequence[int]], last: int) -> list[int]:
    """Triples of each expert in `ids`; those that are not computed count as `last`'s. The host has the same ids in
    `chosen`, so that a GPU is not waited for."""
    if ids.device.type == "cpu":
        counts: list[int] = torch.bincount(ids, minlength=last).tolist()
    else:
        of = np.array(chosen, np.int64).reshape(-1)
        counts = np.bincount(np.where(of == NOTHING, last, of), minlength=last).tolist()
    return counts


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _ranks(order: Sequence[int], experts: Sequence[int]) -> Places:
    """The rows where one row's triples are when sorted by expert, as in transformers' grouped_mm."""
    ranked = sorted(order)
    return Places([ranked.index(expert) for expert in experts], len(ranked))
