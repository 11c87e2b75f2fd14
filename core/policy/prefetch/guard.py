"""Decides whether a prefetch may take a resident's slot: only that of an expert which is less likely to be needed."""

from __future__ import annotations

from collections.abc import Iterable

from core.settings.prefetch import PrefetchSettings

WINDOW = 64  # passes after which a use counts 1 / e
KEEP = 1.0 - 1.0 / WINDOW
FADED = tuple(KEEP**passes for passes in range(1024))  # of a use, so many passes later
MARGIN = 1.5  # how much likelier a prefetch must be; measured: 1 displaces too much, 2 too little (docs/benchmarks.md)


class PrefetchGuard:
    """Compares the probability that a prefetch is needed with the probability that a pass requests the resident: how
    often the last ones did, as an exponential average over the passes so far. A prompt is one pass.

    Both are estimates, and a prefetch that was wrong costs a copy besides the resident: hence the margin. While the
    guard is not `on`, a prefetch may take the slot of whomever the eviction policy names.
    """

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
        self._sum = [0.0] * self._experts  # of its uses, each faded by the passes since; as of the last one
        self._last = [0] * self._experts  # pass of the last use

    def begin_pass(self) -> None:
        """A forward pass begins."""
        self._passes += 1

    def used(self, eids: Iterable[int]) -> None:
        """This pass requests `eids`, each of them once."""
        now, total, last = self._passes, self._sum, self._last
        for eid in eids:
            passes = now - last[eid]
            total[eid] = total[eid] * (FADED[passes] if passes < len(FADED) else KEEP**passes) + (1.0 - KEEP)
            last[eid] = now

    def rate(self, eid: int) -> float:
        """The probability that a pass requests the expert; 0 before the first pass."""
        weight = 1.0 - KEEP**self._passes  # of the passes so far: they are few at first
        return min(1.0, self._sum[eid] * KEEP ** (self._passes - self._last[eid]) / weight) if weight else 0.0

    def may_displace(self, score: float, eid: int) -> bool:
        """Whether a prefetch that is needed with probability `score` may take the slot of `eid`; what is certain to be
        needed always may."""
        return not self.on or score >= 1.0 or score > MARGIN * self.rate(eid)
