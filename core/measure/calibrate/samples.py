"""Uniform samples of the tokens that were read."""

from __future__ import annotations

import numpy as np
import torch

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
