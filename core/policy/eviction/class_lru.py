"""ClassLRU: recency, in classes of frequency: from one class to the next, the age of an expert counts half as much."""

from __future__ import annotations

from functools import cache
from typing import ClassVar

import numpy as np

from core.policy.eviction.base import Eviction, ExpertIndex, Floats, Ids, Ints
from core.settings.registry import register

CLASSES, HALF_LIFE = 8, 128


@register(
    "eviction",
    "class_lru",
    title="ClassLRU",
    help="The expert unused for longest leaves, where the time of one that was often used counts less: uses fade by "
    "half in 128 tokens, and each doubling of them halves the time. Remembers the uses of what has left.",
    source="llama.cpp's expert cache, as the comments of its src/llama-moe-cache.cpp (September 2026) describe it",
)
class ClassLRU(Eviction):
    """crf: an expert's uses, each worth half after `half_life` tokens, kept when it is evicted. class = floor(log2 crf)
    at its last use, at most `classes` - 1. Evicted is the greatest age / 2^class, age = layers computed since the last
    use; that is the least recently used of one of the classes. Score: minus that, exact in floating point, as 2^class
    is a power of two.

    The description is of single tokens: here a prompt's pass is one use of each of its experts, and all of its tokens
    age the others. An expert that was prefetched and never used has class 0, and its age since it was admitted."""

    time_dependent: ClassVar[bool] = True

    def __init__(self, expert_index: ExpertIndex, half_life: int = HALF_LIFE, classes: int = CLASSES) -> None:
        super().__init__(expert_index)
        self._fade, self._most = _fading(half_life), classes - 1
        self._crf: Floats = np.zeros(expert_index.size)  # at the last use
        self._used: Ints = np.zeros(expert_index.size, np.int64)  # `now` of the last use
        self._weight: Floats = np.ones(expert_index.size)  # 2^class

    def admitted(self, ids: Ids, tick: Ids, now: int) -> None:
        self.score[ids] = self._clock(ids, now)

    def used(self, ids: Ids, tick: Ids, now: int) -> None:
        crf = self._crf[ids] * self._fade.take(now - self._used[ids], mode="clip") + 1.0
        self._crf[ids], self._used[ids] = crf, now
        self._weight[ids] = np.ldexp(1.0, np.minimum(np.frexp(crf)[1] - 1, self._most))  # of floor(log2 crf), exactly
        self.score[ids] = self._clock(ids, now)

    def scores(self, part: slice, now: int, layer: Ids) -> Floats:
        at = self.expert_index.layer_of[part] if layer is self.expert_index.layer_of else layer
        ages = now * self.expert_index.layers + np.asarray(at) - self.score[part]
        return np.where(np.isinf(ages), np.inf, -ages / self._weight[part])

    def _clock(self, ids: Ids, now: int) -> Floats:
        """Layers computed until those of `ids`, in the pass that ends at token `now`."""
        clock: Floats = np.asarray(now * self.expert_index.layers + self.expert_index.layer_of[ids], np.float64)
        return clock


@cache
def _fading(half_life: int) -> Floats:
    """What is left of a use after so many tokens. A table gives identical values for one expert and for many."""
    return np.exp2(-np.arange(64 * half_life) / half_life)
