"""How coverage turns into list lengths: lengths of buddy lists at any alpha, and what lists of limited length still
cover (BuddyMoE section 3.3, which looks at the distribution of |B(i; alpha)| to verify that lists are compact).

Arrays of L layers of E experts, A coverages. NumPy only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from core.policy.substitute.base import SubstituteProfile
from core.policy.substitute.buddies import EVEN, Doubles, Floats, covering, cut, rank
from core.settings.param import Value

COVERAGES = (*(at / 20 for at in range(1, 20)), 0.96, 0.97, 0.98, 0.99, 1.0)  # alphas of a curve; it is steep near 1


class ListRule(NamedTuple):
    """How the peers of an expert are ordered in buddy lists (core.policy.substitute.buddy)."""

    weighted: bool
    smoothing: float

    @classmethod
    def of(cls, settings: Mapping[str, Value]) -> ListRule:
        """As it is set."""
        weighted, smoothing = (settings[f"substitute.buddy.{name}"] for name in cls._fields)
        return cls(bool(weighted), float(smoothing))

    def pairs(self, profile: SubstituteProfile) -> Floats | None:
        """[L, E, E] the co-activations that it counts; None where they were not measured."""
        return profile.pairs_weighted if self.weighted else profile.pairs


class LayerLists(NamedTuple):
    """The lists of one layer. Lengths are those without a limit, of the experts that have a list."""

    alpha: float
    experts: int  # that have a list: they were chosen together with another at least once
    shortest: int
    median: float
    longest: int
    limited: float  # share of these experts whose list the limit makes shorter
    covered: float  # what their lists cover, with the limit: mean share of an expert's co-activations


def conditional(pairs: Floats, smoothing: float = 0.0) -> Doubles:
    """[E, E] q(j|i) of one layer's co-activations [E, E] (BuddyMoE section 3.2, smoothed as in 3.3): the share of i's
    that are with j. A row adds up to 1; it is 0 for an expert without any, and so is the diagonal."""
    smoothed = np.asarray(pairs, np.float64) + smoothing
    np.fill_diagonal(smoothed, 0.0)
    sums = smoothed.sum(1, keepdims=True)
    found: Doubles = smoothed / np.where(sums > 0, sums, 1.0)
    return found


def lengths(pairs: Floats, alphas: npt.ArrayLike, smoothing: float = 0.0) -> npt.NDArray[np.int32]:
    """[A, L, E] length of every list without a limit, from co-activations [L, E, E]; 0 = the expert has none. With a
    limit it is the smaller of both. `alphas`: [A], or [A, L] for one of each layer."""
    layers, experts, _ = pairs.shape
    wanted = np.asarray(alphas, np.float64)
    wanted = np.broadcast_to(wanted[:, None] if wanted.ndim == 1 else wanted, (len(wanted), layers))
    found = np.zeros((len(wanted), layers, experts), np.int32)
    for layer in range(layers):  # one at a time, to save memory
        _, before = covering(rank(pairs[layer : layer + 1], experts), experts, smoothing)
        for at, alpha in enumerate(wanted[:, layer]):
            found[at, layer] = (before[0] < alpha - EVEN).sum(-1)
    return found


def percentiles(found: npt.NDArray[np.int32], shown: Sequence[float]) -> Doubles:
    """[P, A] percentiles of lengths [A, L, E], of the experts that have a list; 0 where none has."""
    has = found[-1] > 0
    if not has.any():
        return np.zeros((len(shown), len(found)))
    of: Doubles = np.percentile(found[:, has], shown, axis=1)
    return of


def by_layer(pairs: Floats, alphas: Doubles, most: int, smoothing: float = 0.0) -> list[LayerLists]:
    """Every layer's lists of at most `most` buddies, from co-activations [L, E, E] and each layer's alpha [L]."""
    found = []
    covered = cut(rank(pairs, most), alphas, most, smoothing).q.sum(-1, dtype=np.float64)
    for alpha, long, share in zip(alphas.tolist(), lengths(pairs, alphas[None], smoothing)[0], covered, strict=True):
        has = long > 0
        some = long[has] if has.any() else np.zeros(1, np.int32)
        found.append(
            LayerLists(
                alpha,
                int(has.sum()),
                int(some.min()),
                float(np.median(some)),
                int(some.max()),
                float((some > most).mean()),
                float(share[has].mean()) if has.any() else 0.0,
            )
        )
    return found
