"""One layer's routing as it is computed, beside what the router chose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from core.cache.lease import LeasedExpert, SkippedRequest

NOTHING = -1  # in the place of an expert that was dropped


def distinct(chosen: Sequence[Sequence[int]]) -> list[int]:
    """The experts that some token has: in its order for one token, rising for many."""
    if len(chosen) == 1:
        return [e for e in dict.fromkeys(chosen[0]) if e != NOTHING]
    return sorted({e for row in chosen for e in row if e != NOTHING})


@dataclass(slots=True)
class Routed:
    """`ids` [T, k] to compute, `weights` [T, k], the ids as lists (`chosen`) and the distinct ones (`wanted`); `asked`
    is what the router chose, the same list where nothing was changed. `fates`: its experts that are not fetched."""

    ids: torch.Tensor
    weights: torch.Tensor
    chosen: list[list[int]]
    wanted: list[int]
    asked: list[list[int]]
    fates: Sequence[SkippedRequest] = ()
    executed: bool = False  # a predicted routing, which is then what comes next follows from

    def without_idle(self) -> Routed:
        """Without pairs of weight 0, which nothing is computed for; itself where there are none. All are asked for."""
        idle = self.weights == 0
        if not bool(idle.any()):
            return self
        ids = self.ids.masked_fill(idle, NOTHING)
        return Routed(ids, self.weights, ids.tolist(), self.wanted, self.asked)

    def requests(self, held: list[LeasedExpert]) -> Sequence[LeasedExpert | SkippedRequest]:
        """What became of each distinct expert that the router chose; `held` = all that were computed."""
        if self.chosen is self.asked:
            return held
        asked = set(distinct(self.asked))
        return [*(one for one in held if one.expert in asked), *self.fates]

    @property
    def shown(self) -> tuple[list[list[int]], torch.Tensor | None]:
        """The experts and weights that predictors see: an executed routing, else the router's choice, also where some
        of it was replaced."""
        return (self.chosen if self.executed else self.asked), self.weights
