"""Gates whose last bit depends on where a row stands in the tensor, computed as if it stood where transformers has it.

On a CPU torch computes exponentials in blocks of numbers, and the numbers that are left over at the end of a tensor in
another way, whose results may differ in the last bit. A gate that clamps first works on one run of all its rows'
numbers: where that run ends depends on how many rows there are. transformers has a row for every pair of token and
expert, in the order of experts; here a few rows are there at a time. They are put into zeros of the same places.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

BLOCK = 128  # no fewer numbers than torch computes in one step, and a multiple of it
ROWS = 7  # of a trial ...
TRIALS = 24  # ... and how often: a last bit differs in some numbers only

Gate = Callable[[torch.Tensor], torch.Tensor]


class Places(NamedTuple):
    """Where rows stand among all that transformers computes at once: row i at `at[i]` of `total`."""

    at: Sequence[int]
    total: int


@torch.inference_mode()
def depends(gate: Gate, width: int, dtype: torch.dtype) -> bool:
    """Whether `gate`, [n, width] -> [n, I], gives a row other bits beside others than alone. On a CPU."""
    random = torch.Generator().manual_seed(0)
    for _ in range(TRIALS):
        y = (torch.randn(ROWS, width, generator=random) * 3).to(dtype)
        if not torch.equal(gate(y), torch.cat([gate(row) for row in y.split(1)])):
            return True
    return False


def scattered(gate: Gate, y: torch.Tensor, places: Places) -> torch.Tensor:
    """The gate of a few rows [n, width] that stand at any places of a few."""
    rows = y.new_zeros(places.total, y.shape[1])
    at = list(places.at)
    rows[at] = y
    return gate(rows)[at]


def consecutive(gate: Gate, y: torch.Tensor, start: int, total: int) -> torch.Tensor:
    """The gate of rows [n, width] that stand at start, start + 1, ... of any number."""
    end = start + len(y)
    first = start // BLOCK * BLOCK  # as many whole blocks are before it in both
    last = min(total, -(-end // BLOCK) * BLOCK + BLOCK)  # the end of all, or one that is far enough away
    rows = y.new_zeros(last - first, y.shape[1])
    rows[start - first : end - first] = y
    return gate(rows)[start - first : end - first]
