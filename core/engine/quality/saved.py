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

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from core.cache.core import CacheCore
from core.cache.pool import Pool, numbered_pools
from core.policy.eviction import Eviction, ExpertIndex
from core.types import Outcome, StepRecord

WINDOW = 256  # decoded tokens with a stall


class EngineCache(Protocol):
    """What is needed of the expert cache."""

    layers: int
    experts: int

    @property
    def make_policy(self) -> Callable[[ExpertIndex], Eviction]: ...
    @property
    def transit(self) -> int: ...
    def pool(self, layer: int) -> Pool[Any]: ...


class Waits:
    """`copy_ms()` = the link's estimated time for one expert."""

    def __init__(self, copy_ms: Callable[[], float]) -> None:
        self._copy_ms = copy_ms
        self._last: deque[tuple[float, int]] = deque(maxlen=WINDOW)  # (stall ms, requests waited for)

    def note(self, steps: Sequence[StepRecord]) -> None:
        """Adds forward passes of the session, of any answer."""
        for step in steps:
            waited = int(((step.outcome >= Outcome.PARTIAL_HIT) & (step.outcome <= Outcome.MISS_DISK)).sum())
            if step.phase == "decode" and waited:
                self._last.append((step.stall_ms, waited))

    def wait_ms(self) -> float:
        """Cost of one miss, ms."""
        requests = sum(n for _, n in self._last)
        return sum(ms for ms, _ in self._last) / requests if requests else self._copy_ms()


class Shadow:
    """A simulated cache like the engine's, empty at first, in which every missing expert is fetched; it
    holds ids only."""

    def __init__(self, cache: EngineCache) -> None:
        pools = {pool.part.start: pool for pool in map(cache.pool, range(cache.layers))}
        capacities = [pool.capacity for pool in pools.values()]
        self._core = CacheCore(
            cache.layers, cache.experts, cache.make_policy, numbered_pools(cache.layers * cache.experts, capacities)
        )
        self._core.transit = list(range(cache.transit))

    def read(self, step: StepRecord) -> npt.NDArray[np.bool_]:
        """Reads the next forward pass -> which of its requests [R] are missed."""
        self._core.now += step.tokens
        missed: npt.NDArray[np.bool_] = np.zeros(step.requests, np.bool_)
        eids = step.layer.astype(np.int64) * self._core.experts + step.expert
        for layer in dict.fromkeys(step.layer.tolist()):
            at = np.flatnonzero(step.layer == layer)
            if len(step.ids):  # not of a pass through a part of the layers
                self._core.chosen(layer, step.ids[layer])
            missed[at] = self._request(layer, eids[at].tolist())
        return missed

    def _request(self, layer: int, wanted: list[int]) -> list[bool]:
        core = self._core
        missing = core.lease(layer, wanted)
        for eid in missing:
            if core.admit_requested(eid) is None:  # the layer requests more than fits: any may be evicted
                core.admit(eid)
                core.use(eid)
        core.release(wanted)
        return [eid in missing for eid in wanted]


def spared(steps: Sequence[StepRecord], shadow: Shadow, go_on: Callable[[], None] = lambda: None) -> float | None:
    """exact - lossy per decoded token, mean; None when nothing was decoded or recorded. `go_on` is called before every
    pass and may raise."""
    more, tokens = 0, 0
    for step in steps:
        go_on()
        missed = shadow.read(step)
        if step.phase == "decode" and step.requests:
            brought = (step.outcome == Outcome.PREFETCH_HIT) | (step.outcome == Outcome.PARTIAL_HIT)
            fetched = (step.outcome == Outcome.MISS) | (step.outcome == Outcome.MISS_DISK)
            more += int((missed & ~brought).sum()) - int(fetched.sum())
            tokens += 1
    return more / tokens if tokens else None
