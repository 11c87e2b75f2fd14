"""Decides whether a prefetch may take a resident's slot: only that of an expert which is less likely to be needed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from core.settings.prefetch import PrefetchSettings

WINDOW = 64  # passes after which a use counts 1 / e
KEEP = 1.0 - 1.0 / WINDOW
FADED = np.array([KEEP**passes for passes in range(1024)])  # of a use, so many passes later; next to nothing at last
MOST = 8192  # requests that are not counted yet
MARGIN = 1.5  # how much likelier a prefetch must be; measured: 1 displaces too much, 2 too little (docs/benchmarks.md)


class PrefetchGuard:
    """Compares the probability that a prefetch is needed with the probability that a pass requests the resident: how
    often the last ones did, as an exponential average over the passes so far. A prompt is one pass.

    Both are estimates, and a prefetch that was wrong costs a copy besides the resident: hence the margin. While the
    guard is not `on`, a prefetch may take the slot of the expert that the policy would evict."""

    def __init__(self, experts: int) -> None:
        """`experts` of all layers together, by eid."""
        self.on = True
        self._experts = experts
        self.forget()

    def configure(self, old: PrefetchSettings | None, new: PrefetchSettings) -> None:
        """Compare, or do not."""
        self.on = new.guard

    def forget(self) -> None:
        """Forget all uses."""
        self._passes = 0
        self._pending: list[int] = []  # requested and not counted yet, of one layer after the other
        self._layers: list[int] = []  # for each: how many, and the pass. Flat: nothing to collect
        self._sum = np.zeros(self._experts)  # of its uses, each faded by the passes since; as of the last one
        self._last = np.zeros(self._experts, np.int64)  # pass of the last use

    def begin_pass(self) -> None:
        """A forward pass begins."""
        self._passes += 1

    def used(self, *layers: Sequence[int]) -> None:
        """This pass requests the experts of some layers, each of them once. They are counted when somebody asks, or
        once there are many."""
        for eids in layers:
            self._pending += eids
            self._layers += (len(eids), self._passes)
        if len(self._pending) > MOST:
            self._count()

    def _count(self) -> None:
        every, layers, at = np.array(self._pending, np.int64), iter(self._layers), 0
        self._pending, self._layers = [], []
        for count, passes in zip(layers, layers, strict=True):
            ids = every[at : at + count]
            at += count
            faded = FADED.take(passes - self._last[ids], mode="clip")
            self._sum[ids] = self._sum[ids] * faded + (1.0 - KEEP)
            self._last[ids] = passes

    def rate(self, eid: int) -> float:
        """The probability that a pass requests the expert; 0 before the first pass."""
        if self._pending:
            self._count()
        weight = 1.0 - KEEP**self._passes  # of the passes so far: they are few at first
        faded = KEEP ** (self._passes - int(self._last[eid]))
        return min(1.0, float(self._sum[eid]) * faded / weight) if weight else 0.0

    def may_displace(self, score: float, eid: int) -> bool:
        """Whether a prefetch that is needed with probability `score` may take the slot of `eid`; what is certain to be
        needed always may."""
        return not self.on or score >= 1.0 or score > MARGIN * self.rate(eid)
