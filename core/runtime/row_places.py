"""Makes activations whose last bit depends on a row's position in the tensor bit-identical to transformers.

On a CPU torch computes exponentials in blocks, and the elements left over at the end of a tensor by other code, whose
results may differ in the last bit. An activation that clamps first works on one contiguous run of all elements, so
where that run ends depends on the number of rows. transformers has a row for every pair of token and expert, ordered by
expert; here only a few rows are computed at a time. They are placed at the same positions of a zero tensor.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

BLOCK = 128  # a multiple of, and at least, the number of elements that torch computes in one step
ROWS = 7  # of a trial
TRIALS = 24  # number of trials: a last bit differs in some elements only

Gate = Callable[[torch.Tensor], torch.Tensor]


class Places(NamedTuple):
    """Positions of rows among all rows that transformers computes at once: row i is row `at[i]` of `total`."""

    at: Sequence[int]
    total: int


@torch.inference_mode()
def depends_on_position(gate: Gate, width: int, dtype: torch.dtype) -> bool:
    """Whether `gate`, [n, width] -> [n, I], gives a row other bits among other rows than alone. On a CPU."""
    random = torch.Generator().manual_seed(0)
    for _ in range(TRIALS):
        y = (torch.randn(ROWS, width, generator=random) * 3).to(dtype)
        if not torch.equal(gate(y), torch.cat([gate(row) for row in y.split(1)])):
            return True
    return False


def gated(gate: Gate, y: torch.Tensor, places: Places) -> torch.Tensor:
    """The gate of rows [n, width] at these positions. Of positions that do not follow one another all `total` rows are
    computed, so that there should be few."""
    at, total = places
    if not isinstance(at, range):
        rows, where = y.new_zeros(total, y.shape[1]), list(at)
        rows[where] = y
        return gate(rows)[where]
    first = at.start // BLOCK * BLOCK  # keeps a whole number of blocks before the first row
    last = min(total, -(-at.stop // BLOCK) * BLOCK + BLOCK)  # the real end, or one far enough after the last row
    rows = y.new_zeros(last - first, y.shape[1])
    rows[at.start - first : at.stop - first] = y
    return gate(rows)[at.start - first : at.stop - first]
