"""A store of expert maps: the router distributions of whole passes, searched for the pass most similar to this one."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from core.policy.predict.base import Floats

Singles = npt.NDArray[np.float32]


class Match(NamedTuple):
    """The most similar map is at `place`; cosine `score`, in [-1, 1]."""

    place: int
    score: float


class MapStore:
    """At most `capacity` maps [L, E] with the embeddings [H] they belong to (FineMoE sections 4.1, 4.2 and 4.4).

    4 * capacity * (L * E + H) bytes. Ties go to the lowest place."""

    def __init__(self, capacity: int, layers: int, experts: int, hidden: int) -> None:
        self.capacity, self.count = capacity, 0
        self.maps: Singles = np.zeros((layers, capacity, experts), np.float32)
        self._keys: Singles = np.zeros((capacity, hidden), np.float32)  # of length 1
        self._squares: Singles = np.zeros((layers, capacity), np.float32)  # sum of squares of layers 0 ... l

    def by_embedding(self, key: Floats) -> Singles:
        """[count] cosine of each stored embedding with `key` [H]."""
        found: Singles = self._keys[: self.count] @ _unit(key)
        return found

    def add(self, key: Floats, one: Floats, distance: int, trajectory: Singles) -> int:
        """Store a map [L, E]; returns its place. A full store replaces the map most redundant with the new one: RDY =
        d/L * cosine of embeddings + (L - d)/L * cosine of maps, d = `distance`, the latter as computed by `Walk`."""
        if self.count < self.capacity:
            place = self.count
            self.count += 1
        else:
            share = min(distance, len(self.maps)) / len(self.maps)
            place = int(np.argmax(share * self.by_embedding(key) + (1.0 - share) * trajectory))
        self._keys[place] = _unit(key)
        self.maps[:, place] = one
        self._squares[:, place] = np.cumsum(np.square(one, dtype=np.float32).sum(1))
        return place

    def walk(self) -> Walk:
        """Start comparing a new pass, layer by layer."""
        return Walk(self)

    def squares(self, layer: int) -> Singles:
        """[count] squared length of each map up to and including `layer`."""
        found: Singles = self._squares[layer, : self.count]
        return found


class Walk:
    """One pass in progress: its cosine with every stored map over the layers so far; each layer is processed once."""

    def __init__(self, store: MapStore) -> None:
        self._store, self._count, self._own = store, store.count, 0.0
        self._dots: Singles = np.zeros(self._count, np.float32)
        self.seen: list[Singles] = []

    def step(self, distribution: Floats) -> Singles:
        """The next layer's distribution [E] -> [count] cosine of the trajectory up to it."""
        one = np.asarray(distribution, np.float32)
        layer = len(self.seen)
        self.seen.append(one)
        self._own += float(one @ one)
        self._dots += self._store.maps[layer, : self._count] @ one
        lengths = np.sqrt(self._store.squares(layer)[: self._count] * np.float32(self._own))
        scores: Singles = self._dots / np.maximum(lengths, np.float32(1e-12))
        return scores


def best_match(scores: Singles) -> Match | None:
    """The highest score; None for an empty store."""
    if not len(scores):
        return None
    place = int(np.argmax(scores))
    return Match(place, float(scores[place]))


def select(distribution: Floats, score: float | None, least: int) -> npt.NDArray[np.int64]:
    """Experts by descending probability [E] until they add up to delta = clip(1 - score, 0, 1), at least `least` of
    them (FineMoE section 4.3, constraints 7 and 8). Without a score: exactly `least`."""
    order = np.argsort(-distribution, kind="stable")
    if score is None:
        return order[:least]
    delta = min(1.0, max(0.0, 1.0 - score))
    sums = np.cumsum(distribution[order], dtype=np.float64)
    enough = int(np.searchsorted(sums, delta - 1e-9)) + 1  # float32 shares may sum to less than 1
    return order[: max(least, enough)]


def _unit(key: Floats) -> Singles:
    one = np.asarray(key, np.float32)
    length = float(np.linalg.norm(one))
    found: Singles = one / np.float32(length or 1.0)
    return found
