"""What a group of sequences needs: the union of their experts."""

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

Paths = npt.NDArray[np.bool_]
"""[n, L * E]: the experts that each of n sequences is expected to need for its next token."""


def union_size(paths: Paths, groups: Iterable[Sequence[int]]) -> int:
    """The experts that groups of sequences need, summed over layers and groups. Source: ExpertFlow equation 4, with OR
    in place of the AND that it prints, as its equation 7 has it."""
    return sum(int(np.count_nonzero(paths[list(group)].any(0))) for group in groups if len(group))


def batch_accuracy(true: npt.NDArray[np.bool_], predicted: npt.NDArray[np.bool_]) -> float:
    """B_acc of two unions [L, E]: the share of the experts that a batch needed that were predicted, mean over the
    layers that needed any. NaN where none did. Source: ExpertFlow section 4.2."""
    needed = true.sum(1)
    found = (true & predicted).sum(1)
    some = needed > 0
    return float(np.mean(found[some] / needed[some])) if some.any() else float("nan")
