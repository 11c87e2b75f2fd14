"""The token scheduler of ExpertFlow, and what it is compared with."""

import random
from typing import Annotated, Protocol

import numpy as np
import numpy.typing as npt

from core.policy.batching.unions import Paths, union_size
from core.settings.param import Param
from core.settings.registry import register

Packed = npt.NDArray[np.uint64]  # paths, 64 experts a number
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
    """k-means with k = 2 and medoids over the similarity 1 - hamming / (L * E), of clusters of at most `size`; then two
    sequences change places, those by which the predicted union shrinks most, as long as it does.

    The best partition seen is where exchanges begin, the order of arrival included: the predicted union never grows.
    Exchanges are ours: k-medoids alone stops at a union of 6 experts in most starts of the paper's figure 4, whose
    optimum is 4."""

    def __init__(
        self,
        seed: Seed = 0,
        rounds: Annotated[
            int, Param("Rounds of clustering, and then exchanges, at most.", title="Rounds", low=1, high=100, step=1)
        ] = 8,
    ) -> None:
        self._draw, self._rounds = random.Random(seed), rounds

    def regroup(self, paths: Paths, size: int) -> Groups:
        best = in_order(len(paths), size)
        if len(best) < 2:
            return best
        bits = _packed(paths)
        return self._exchanged(bits, self._clustered(bits, paths.shape[1], best, size), size)

    def _clustered(self, bits: Packed, experts: int, best: Groups, size: int) -> Groups:
        """The best of the clusterings on the way from two random medoids, or `best` where none is better."""
        alike = _similarity(bits, experts)
        least, seen = _united(bits, best), set[tuple[int, ...]]()
        medoids = self._draw.sample(range(len(bits)), 2)
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

    def _exchanged(self, bits: Packed, groups: Groups, size: int) -> Groups:
        """After the exchanges that shrink the union most. A group that is not full has places that need nothing, with
        which a sequence can change, too."""
        n = len(bits)
        bits = np.concatenate([bits, np.zeros((2 * size - n, bits.shape[1]), bits.dtype)])
        free = iter(range(n, 2 * size))
        places = [[*group, *(next(free) for _ in range(size - len(group)))] for group in groups]
        for _ in range(self._rounds):
            grows = _growth(bits, *places)
            one, other = divmod(int(grows.argmin()), size)
            if grows[one, other] >= 0:
                break
            places[0][one], places[1][other] = places[1][other], places[0][one]
        return [sorted(at for at in group if at < n) for group in places]


def in_order(n: int, size: int) -> Groups:
    """`n` sequences in groups of `size`, in the order of arrival. Raises ValueError for more than two groups."""
    if n > 2 * size:
        raise ValueError(f"{n} sequences do not fit into two batches of {size}")
    return [list(range(at, min(n, at + size))) for at in range(0, n, size)]


def _packed(paths: Paths) -> Packed:
    """Paths [n, L * E] as bits."""
    bits = np.packbits(paths, axis=1)
    return np.pad(bits, ((0, 0), (0, -bits.shape[1] % 8))).view(np.uint64)


def _similarity(bits: Packed, size: int) -> npt.NDArray[np.float32]:
    """[n, n] 1 - hamming / (L * E) of each two of n paths of `size` bits, packed. Bits are counted, as a product of
    matrices would wait for the threads of a library that others use as well."""
    differ = _count(bits[:, None] ^ bits[None])
    result: npt.NDArray[np.float32] = 1 - differ.astype(np.float32) / np.float32(size)
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


def _united(bits: Packed, groups: Groups) -> int:
    """As `union_size`, of packed paths."""
    return sum(_count(np.bitwise_or.reduce(bits[group], 0)).item() for group in groups)


def _growth(bits: Packed, one: list[int], other: list[int]) -> npt.NDArray[np.int64]:
    """[len(one), len(other)] by how much the sum of both unions grows where two sequences change places."""
    mine, theirs = bits[one], bits[other]
    return _replaced(mine, theirs) + _replaced(theirs, mine).T


def _replaced(group: Packed, others: Packed) -> npt.NDArray[np.int64]:
    """[members, others] by how much the union of a group grows where one of the others takes a member's place: by what
    no other member needs and it does, less what the member alone needs and it does not."""
    before = np.zeros(
        (len(group) + 1, group.shape[1]), group.dtype
    )  # united: the members before each one, and after it
    after = before.copy()
    np.bitwise_or.accumulate(group, 0, out=before[1:])
    np.bitwise_or.accumulate(group[::-1], 0, out=after[1:])
    without = before[:-1] | after[-2::-1]
    return _count(others & ~without[:, None]) - _count(group & ~without)[:, None]


def _count(bits: Packed) -> npt.NDArray[np.int64]:
    """The bits that are set, over the last axis."""
    found: npt.NDArray[np.int64] = np.bitwise_count(bits).sum(-1, dtype=np.int64)
    return found


__all__ = ["NoScheduler", "RandomScheduler", "Scheduler", "TokenScheduler", "in_order", "union_size"]
