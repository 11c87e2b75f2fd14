"""MIN evicts the expert needed again last. It needs the future, so it works on traces only and is in no menu."""

import numpy as np

from core.policy.eviction.base import Eviction, ExpertIndex, Floats, Ids

NEVER = 2**31 - 1


class Belady(Eviction):
    """No eviction has fewer misses on the same requests and slots (Belady 1966), compulsory ones included. That holds
    among caches that admit whatever is missing, and among those with a transit slot (see core.cache.core) for each miss
    of a pass, which need not.

    With transit slots a cache keeps, of what it holds and what was asked for, whatever is needed again soonest: the
    largest set of intervals from one use to the next of which no more than its slots ever overlap (Carlisle and Lloyd
    1995).

    Score: minus the pass of the next use, which `foresee` must provide before each use."""

    def __init__(self, expert_index: ExpertIndex) -> None:
        super().__init__(expert_index)
        self._next: Floats = np.full(expert_index.size, float(NEVER))

    def foresee(self, ids: Ids, next_pass: Ids) -> None:
        """The experts `ids` are used now, and next in the passes `next_pass`; NEVER = not again."""
        self._next[ids] = next_pass

    def admitted(self, ids: Ids, tick: Ids, now: int) -> None:
        self.score[ids] = -self._next[ids]

    def used(self, ids: Ids, tick: Ids, now: int) -> None:
        self.score[ids] = -self._next[ids]
