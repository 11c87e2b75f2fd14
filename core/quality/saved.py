"""Estimates how much waiting for copies a lossy answer saved; shown as an estimate everywhere.

saved per decoded token = (exact - lossy) / tokens x wait, over the decoded tokens of an answer.
  exact = requests that the same cache would have missed if every missing expert had been fetched: the engine's policy
          and pools on the routers' own choices, from the beginning of the prompt. A prefetched expert is no miss.
          A missing expert that is requested token after token thus counts once, not every time.
  lossy = requests that were missed and fetched.
  wait  = cost of such a request in this session: stall time over the last decoded tokens that had to wait, divided by
          the requests they waited for; the part of a copy hidden behind compute is thus left out. Before the first
          wait: the link's time for a copy.
It leaves out what the prompt saved and the time to choose substitutes, which is part of the token's own time; and it
takes the routing as it was, which in an exact answer might have been different.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from core.cache.pool import Pool
from core.policy.eviction import GONE, Eviction, ExpertIndex, victim
from core.types import Outcome, StepRecord

WINDOW = 256  # decoded tokens with a stall


class Cache(Protocol):
    """What is needed of the expert cache."""

    layers: int
    experts: int

    @property
    def make_policy(self) -> Callable[[ExpertIndex], Eviction]: ...
    def pool(self, layer: int) -> Pool: ...


class Waits:
    """`copy_ms()` = the link's estimated time for one expert."""

    def __init__(self, copy_ms: Callable[[], float]) -> None:
        self._copy_ms = copy_ms
        self._last: deque[tuple[float, int]] = deque(maxlen=WINDOW)  # (stall ms, requests waited for)

    def note(self, steps: Sequence[StepRecord]) -> None:
        """Adds forward passes of the session, of any answer."""
        for step in steps:
            waited = int(((step.outcome >= Outcome.LATE) & (step.outcome <= Outcome.MISS_DISK)).sum())
            if step.phase == "decode" and waited:
                self._last.append((step.stall_ms, waited))

    def wait_ms(self) -> float:
        """Cost of one miss, ms."""
        requests = sum(n for _, n in self._last)
        return sum(ms for ms, _ in self._last) / requests if requests else self._copy_ms()


class Shadow:
    """A simulated cache like the engine's, empty at first, in which every missing expert is fetched; it
    holds ids only."""

    def __init__(self, cache: Cache) -> None:
        self._experts = cache.experts
        self._policy = cache.make_policy(ExpertIndex(cache.layers, cache.experts))
        pools = [cache.pool(layer) for layer in range(cache.layers)]
        self._pools = [(pool.part, pool.capacity) for pool in pools]  # of each layer
        self._held = dict.fromkeys((pool.part.start for pool in pools), 0)
        self._now = self._tick = 0

    def read(self, step: StepRecord) -> npt.NDArray[np.bool_]:
        """Reads the next forward pass -> which of its requests [R] are missed."""
        self._now += 1
        missed: npt.NDArray[np.bool_] = np.zeros(step.requests, np.bool_)
        eids = step.layer.astype(np.int64) * self._experts + step.expert
        for layer in dict.fromkeys(step.layer.tolist()):
            at = np.flatnonzero(step.layer == layer)
            missed[at] = self._request(layer, eids[at].tolist())
        return missed

    def _request(self, layer: int, wanted: list[int]) -> list[bool]:
        policy, (part, capacity) = self._policy, self._pools[layer]
        missing = [bool(policy.score[eid] == GONE) for eid in wanted]
        for eid, is_missing in zip(wanted, missing, strict=True):
            if not is_missing:
                self._use(eid)
        for eid, is_missing in zip(wanted, missing, strict=True):
            if is_missing:
                self._held[part.start] += 1
                if self._held[part.start] > capacity:
                    self._evict(layer, part, wanted)
                policy.admitted(eid, self._tick, self._now)
                self._use(eid)
        if not policy.retains:
            for eid in wanted:
                policy.left(eid)
            self._held[part.start] = 0
        return missing

    def _use(self, eid: int) -> None:
        self._tick += 1
        self._policy.used(eid, self._tick, self._now)

    def _evict(self, layer: int, part: slice, wanted: list[int]) -> None:
        """Evicts an expert that this layer does not request, or else any."""
        gone = victim(self._policy, part, self._now, layer, wanted)
        if gone is None:
            gone = victim(self._policy, part, self._now, layer)
        assert gone is not None
        self._policy.left(gone)
        self._held[part.start] -= 1


def spared(steps: Sequence[StepRecord], shadow: Shadow, go_on: Callable[[], None] = lambda: None) -> float | None:
    """exact - lossy per decoded token, mean; None when nothing was decoded or recorded. `go_on` is called before every
    pass and may raise."""
    more, tokens = 0, 0
    for step in steps:
        go_on()
        missed = shadow.read(step)
        if step.phase == "decode" and step.requests:
            brought = (step.outcome == Outcome.PREFETCH_HIT) | (step.outcome == Outcome.LATE)
            fetched = (step.outcome == Outcome.MISS) | (step.outcome == Outcome.MISS_DISK)
            more += int((missed & ~brought).sum()) - int(fetched.sum())
            tokens += 1
    return more / tokens if tokens else None
