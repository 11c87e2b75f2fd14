"""One layer's routing as computed, beside the router's choice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from core.cache.lease import LeasedSegment, SkippedRequest

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
