"""The token scheduler of ExpertFlow, and what it is compared with."""

from __future__ import annotations

import random
from typing import Annotated, Protocol

import numpy as np
import numpy.typing as npt

from core.policy.batching.unions import Paths, union_size
from core.settings.param import Param
from core.settings.registry import register

Groups = list[list[int]]
"""Sequences by their place in what was given; each in one group, in ascending order."""
Seed = Annotated[int, Param("Another one draws other groups.", title="Seed", low=0, high=1 << 30, step=1)]


class Scheduler(Protocol):
    """Divides sequences into two batches."""

    def regroup(self, paths: Paths, size: int) -> Groups:
        """Two groups of at most `size` of the n <= 2 * size sequences whose expected experts are `paths` [n, L * E];
        one group where all fit into it."""


@register(
    "scheduler",
    "none",
    title="None",
    help="Sequences are computed in the order of their arrival.",
    source="control: ExpertFlow section 4.4, without its scheduler",
)
class NoScheduler:
    """The order of arrival."""

    def regroup(self, paths: Paths, size: int) -> Groups:
        return in_order(len(paths), size)


@register(
    "scheduler",
    "random",
    title="Random",
    help="Sequences are divided at random. What a scheduler must beat.",
    source="control",
)
class RandomScheduler:
    """Groups of random sequences."""

    def __init__(self, seed: Seed = 0) -> None:
        self._draw = random.Random(seed)

    def regroup(self, paths: Paths, size: int) -> Groups:
        order = list(range(len(paths)))
        self._draw.shuffle(order)
        return [sorted(order[at] for at in group) for group in in_order(len(paths), size)]


@register(
    "scheduler",
    "similarity",
    title="Token scheduler",
    help="Sequences that are expected to need the same experts are computed together, so that each batch needs fewer.",
    source="ExpertFlow section 3.3",
)
class TokenScheduler:
    """k-means with k = 2 and medoids over the similarity 1 - hamming / (L * E), of clusters of at most `size`.

    The best partition seen is kept, the order of arrival included, so that the predicted union never grows.
    """

    def __init__(
        self,
        seed: Seed = 0,
        rounds: Annotated[int, Param("Rounds of clustering at most.", title="Rounds", low=1, high=100, step=1)] = 8,
    ) -> None:
        self._draw, self._rounds = random.Random(seed), rounds

    def regroup(self, paths: Paths, size: int) -> Groups:
        n = len(paths)
        best = in_order(n, size)
        if len(best) < 2:
            return best
        bits = np.packbits(paths, axis=1)
        alike = _similarity(bits, paths.shape[1])
        least, seen = _united(bits, best), set[tuple[int, ...]]()
        medoids = self._draw.sample(range(n), 2)
        for _ in range(self._rounds):
            groups = _clusters(alike, medoids, size)
            union = _united(bits, groups)
            if union < least:
                best, least = groups, union
            if tuple(groups[0]) in seen:
                break
            seen.add(tuple(groups[0]))
            medoids = [_medoid(alike, group) for group in groups]
        return best


def in_order(n: int, size: int) -> Groups:
    """`n` sequences in groups of `size`, in the order of arrival. Raises ValueError for more than two groups."""
    if n > 2 * size:
        raise ValueError(f"{n} sequences do not fit into two batches of {size}")
    return [list(range(at, min(n, at + size))) for at in range(0, n, size)]


def _similarity(bits: npt.NDArray[np.uint8], size: int) -> npt.NDArray[np.float32]:
    """[n, n] 1 - hamming / (L * E) of each two of n paths of `size` bits, packed. Bits are counted, as a product of
    matrices would wait for the threads of a library that others use as well."""
    differ = np.bitwise_count(bits[:, None] ^ bits[None]).sum(-1, dtype=np.int32)
    result: npt.NDArray[np.float32] = 1 - differ / np.float32(size)
    return result


def _clusters(alike: npt.NDArray[np.float32], medoids: list[int], size: int) -> Groups:
    """Each sequence with the medoid that it is more similar to; of a cluster that is too large those leave that lose
    least by it."""
    gain = alike[:, medoids[0]] - alike[:, medoids[1]]  # of being in the first
    order = np.argsort(-gain, kind="stable")
    n = len(alike)
    first = min(size, max(n - size, int(np.count_nonzero(gain >= 0))))
    return [sorted(order[:first].tolist()), sorted(order[first:].tolist())]


def _medoid(alike: npt.NDArray[np.float32], group: list[int]) -> int:
    """The member that is most similar to all of them; the earliest of equal ones."""
    return group[int(alike[np.ix_(group, group)].sum(1).argmax())]


def _united(bits: npt.NDArray[np.uint8], groups: Groups) -> int:
    """As `union_size`, of packed paths."""
    return sum(int(np.bitwise_count(np.bitwise_or.reduce(bits[group], 0)).sum()) for group in groups)


__all__ = ["NoScheduler", "RandomScheduler", "Scheduler", "TokenScheduler", "in_order", "union_size"]
