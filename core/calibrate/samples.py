"""Uniform samples of what was read: of single tokens, and of the expert paths of whole texts."""

from __future__ import annotations

import heapq

import numpy as np
import numpy.typing as npt
import torch

from core.policy.predict.nets.path import Passage
from core.trace.chunk import id_type

PATH_TOKENS = 32768
SEED = 0


class Draw:
    """A uniform sample of `capacity` tokens; which tokens of a pass are in it is decided before the pass
    (algorithm R)."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self._seen = capacity, 0
        self._random = np.random.default_rng(SEED)
        self.rows, self.slots = torch.zeros(0, dtype=torch.int64), np.zeros(0, np.int64)

    def begin(self, tokens: int) -> None:
        """A pass over `tokens` tokens follows: those at `rows` go to positions `slots` of the sample."""
        slots: dict[int, int] = {}
        for row, number in enumerate(range(self._seen, self._seen + tokens)):
            slot = number if number < self.capacity else int(self._random.integers(number + 1))
            if slot < self.capacity:
                slots[slot] = row
        self._seen += tokens
        self.rows, self.slots = torch.tensor(list(slots.values()), dtype=torch.int64), np.array(list(slots), np.int64)

    @property
    def count(self) -> int:
        """Tokens in the sample."""
        return min(self._seen, self.capacity)


class Paths:
    """A uniform sample of texts with at most `tokens` tokens in all, but at least one text. Memory: tokens * L * k
    bytes, twice that for models with more than 256 experts per layer."""

    def __init__(self, experts: int, tokens: int = PATH_TOKENS) -> None:
        self._type, self._room, self._count = id_type(experts), tokens, 0
        self._random = np.random.default_rng(SEED)
        self._kept: list[tuple[float, int, Passage]] = []  # a heap; the next to be dropped is first

    def add(self, tokens: npt.NDArray[np.integer], ids: npt.NDArray[np.integer], prompt: int) -> None:
        """Adds a text's tokens [T] and choices [T, L, k]; its first `prompt` tokens are the prompt."""
        listed: list[int] = tokens.tolist()
        passage = Passage(listed[:prompt], listed, torch.from_numpy(ids.astype(self._type)))
        heapq.heappush(self._kept, (float(self._random.random()), self._count, passage))
        self._count += 1
        self._room -= len(listed)
        while self._room < 0 and len(self._kept) > 1:
            self._room += len(heapq.heappop(self._kept)[2].ids)

    def passages(self) -> list[Passage]:
        """The sampled texts, in the order they were added."""
        return [passage for _, _, passage in sorted(self._kept, key=lambda kept: kept[1])]
