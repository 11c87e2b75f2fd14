"""Statistics of routing alone, from ids and weights: activations, co-activations, gate entropies, layer 0's usual
experts.

Memory: three float64 [L, E, E], five int64 [L, 16384], and E numbers for each distinct token id."""

from typing import Any

import numpy as np
import numpy.typing as npt

from core.policy.substitute.entropy import TEMPERATURES, entropy, renormalised

BINS = 1 << 14  # of the histogram of gate entropies in [0, 1]

Ids = npt.NDArray[Any]
Floats = npt.NDArray[np.floating]


class Activations:
    """A(i) and M(i, j) of BuddyMoE sections 3.2 and 3.3, binary and weighted, for all layers."""

    def __init__(self, layers: int, experts: int) -> None:
        self._experts = experts
        self.counts = np.zeros((layers, experts), np.int64)
        self._both = np.zeros((layers, experts, experts))
        self._weighted = np.zeros((layers, experts, experts))
        self._has_weights = False

    def add(self, layer: int, ids: Ids, weights: Floats | None = None, each: Floats | None = None) -> None:
        """Adds some tokens' choices and gate weights [T, k]. An id that a token has twice counts once. `each` [T]: how
        much each token counts in M, from 0 to 1; by default all count 1."""
        ids = ids.astype(np.int64)
        member = np.zeros((len(ids), self._experts), np.float32)
        np.put_along_axis(member, ids, 1.0, -1)
        self.counts[layer] += member.sum(0).astype(np.int64)
        self._both[layer] += member.T @ (member if each is None else member * each.astype(np.float32)[:, None])
        if weights is not None:
            self._has_weights = True
            again = np.tril(ids[:, :, None] == ids[:, None, :], -1).any(-1)
            shares = renormalised(np.where(again, 0.0, weights).astype(np.float64))
            least = np.minimum(shares[:, :, None], shares[:, None, :])
            least = least if each is None else least * each[:, None, None]
            cells = ids[:, :, None] * self._experts + ids[:, None, :]
            self._weighted[layer] += np.bincount(cells.ravel(), least.ravel(), self._experts**2).reshape(
                self._experts, self._experts
            )

    def pairs(self) -> npt.NDArray[np.float32]:
        """[L, E, E] tokens that chose both."""
        return _off_diagonal(self._both)

    def pairs_weighted(self) -> npt.NDArray[np.float32] | None:
        """[L, E, E] sum over tokens of the smaller of both renormalised weights; None when there were no weights."""
        return _off_diagonal(self._weighted) if self._has_weights else None


class Entropies:
    """Percentiles of the token gate TAE = -sum g log g / log k (BuddyMoE section 3.1), at every one of TEMPERATURES;
    exact to 1 / BINS."""

    def __init__(self, layers: int) -> None:
        self._seen = np.zeros((layers, len(TEMPERATURES), BINS), np.int64)

    def add(self, layer: int, weights: Floats) -> None:
        """Adds some tokens' gate weights [T, k]."""
        wide = weights.astype(np.float64)
        for seen, temperature in zip(self._seen[layer], TEMPERATURES, strict=True):
            at = np.minimum((entropy(wide, temperature) * BINS).astype(np.int64), BINS - 1)
            seen += np.bincount(at, minlength=BINS)

    def percentiles(self) -> npt.NDArray[np.float32] | None:
        """[L, 101] at temperature 1: the p-th is the smallest value that p % of the tokens do not exceed. None when
        nothing was added."""
        found = self.tempered()
        return None if found is None else np.ascontiguousarray(found[:, TEMPERATURES.index(1.0)])

    def tempered(self) -> npt.NDArray[np.float32] | None:
        """[L, 5, 101] the same at each of TEMPERATURES."""
        upto = self._seen.cumsum(-1)
        if not upto[..., -1].all():
            return None
        found = np.empty((*upto.shape[:2], 101), np.float32)
        for at in np.ndindex(upto.shape[:2]):
            ranks = np.maximum(1, np.ceil(np.arange(101) / 100 * upto[at][-1] - 1e-9))
            found[at] = (np.searchsorted(upto[at], ranks) + 0.5) / BINS
        return found


def _off_diagonal(matrix: Floats) -> npt.NDArray[np.float32]:
    found = matrix.astype(np.float32)
    each = np.arange(found.shape[-1])
    found[:, each, each] = 0.0
    return found
