"""The search in expert maps, run in a worker: the messages it gets from passes, and its answers."""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from core.policy.predict.base import Floats, Prediction, union
from core.policy.predict.maps import MapStore, Match, Singles, Walk, best_match, select
from core.policy.predict.worker import WorkerTask

OPEN, FOLLOW = 0, 1
HEAD = struct.Struct("<4i")  # of a message: OPEN, pass, tokens, 0, then the embedding [H] float32, or nothing;
# or FOLLOW, pass, layer, 0, then the router's distribution [E] float32
FOUND = struct.Struct("<4i")  # of each part of an answer: pass, layer, n, E, then n of PREDICTED, then the map's
# distribution [E] float32 of the layer
PREDICTED = np.dtype([("score", "<f8"), ("expert", "<i8")])


class MapMatch(NamedTuple):
    """The search result for one layer of a pass: the predictions, likeliest first, and the map's whole `distribution`
    [E] of the layer."""

    number: int
    layer: int
    predictions: list[Prediction]
    distribution: Singles


def opened(number: int, tokens: int) -> bytes:
    """The head of the message that starts a pass; its embedding follows."""
    return HEAD.pack(OPEN, number, tokens, 0)


def followed(number: int, layer: int) -> bytes:
    """The head of the message with the router's distribution of `layer`, which follows."""
    return HEAD.pack(FOLLOW, number, layer, 0)


def read(answer: bytes) -> Iterator[MapMatch]:
    """The results in an answer."""
    at = 0
    while at < len(answer):
        number, layer, count, experts = FOUND.unpack_from(answer, at)
        rows = np.frombuffer(answer, PREDICTED, count, at + FOUND.size).tolist()
        at += FOUND.size + count * PREDICTED.itemsize
        distribution: Singles = np.frombuffer(answer, "<f4", experts, at)
        at += distribution.nbytes
        yield MapMatch(number, layer, [Prediction(layer, expert, score) for score, expert in rows], distribution)


@dataclass(slots=True)
class _Pass:
    """A pass: its number, how many tokens it has, their embedding [H], and how it compares with the stored ones."""

    number: int = 0
    tokens: int = 0
    key: Floats | None = None
    walk: Walk | None = None


class MapSearch:
    """A core.policy.predict.worker.Worker. `task.sizes`: layers, experts, top_k, distance, capacity, semantic, dynamic,
    learn; `task.arrays`: the initial maps [N, L, E] and map_keys [N, H], or nothing."""

    def __init__(self, task: WorkerTask) -> None:
        sizes = task.sizes
        self._layers, self._experts, self._top_k = sizes["layers"], sizes["experts"], sizes["top_k"]
        self._distance, self._capacity = sizes["distance"], sizes["capacity"]
        self._semantic, self._dynamic, self._learn = sizes["semantic"], sizes["dynamic"], sizes["learn"]
        self._known = task.arrays
        self.store: MapStore | None = None
        self._pass = self._coming = _Pass()  # the one in progress; the last that was opened

    def work(self, message: bytes) -> bytes:
        kind, number, at, _ = HEAD.unpack_from(message)
        values = np.frombuffer(message, "<f4", offset=HEAD.size)
        if kind == OPEN:  # maybe while another pass is in progress
            self._coming = _Pass(number, at, values if len(values) else None)
            return self._begin(self._coming)
        if number == self._coming.number:
            self._pass = self._coming
        return self._step(self._pass, at, values) if number == self._pass.number else b""

    def _begin(self, one: _Pass) -> bytes:
        if one.key is None:
            return b""
        store = self.store = self.store or self._fill(len(one.key))
        match = best_match(store.by_embedding(one.key)) if self._semantic else None
        ahead = range(min(self._distance, self._layers))
        return b"".join(self._found(one, match, layer) for layer in ahead) if match is not None else b""

    def _step(self, one: _Pass, layer: int, distribution: Floats) -> bytes:
        store = self.store
        if store is None:
            return b""  # no embedding has come yet, so its size is unknown
        walk = one.walk = one.walk or store.walk()
        if layer != len(walk.seen):
            return b""  # an earlier layer is missing
        scores = walk.step(distribution)
        if layer + 1 == self._layers:
            if self._learn and one.key is not None:
                store.add(one.key, np.stack(walk.seen), self._distance, scores)
            return b""
        ahead = layer + self._distance
        match = best_match(scores) if ahead < self._layers else None
        return self._found(one, match, ahead) if match is not None else b""

    def _found(self, one: _Pass, match: Match, layer: int) -> bytes:
        assert self.store is not None
        distribution = self.store.maps[layer, match.place]
        chosen = select(
            distribution, match.score if self._dynamic else None, min(self._top_k * one.tokens, self._experts)
        )
        p = distribution[chosen].astype(np.float64)
        rows = np.empty(len(chosen), PREDICTED)
        with np.errstate(divide="ignore"):
            rows["score"] = union(one.tokens * np.log1p(-np.minimum(p, 1.0)), self._top_k)
        rows["expert"] = chosen
        head = FOUND.pack(one.number, layer, len(rows), self._experts)
        whole: bytes = distribution.astype("<f4", copy=False).tobytes()
        return head + rows.tobytes() + whole

    def _fill(self, hidden: int) -> MapStore:
        """A store with the profile's maps, or an even selection if there are more than it holds."""
        store = MapStore(self._capacity, self._layers, self._experts, hidden)
        if self._known:
            keys, maps = self._known["map_keys"], self._known["maps"]
            for at in np.linspace(0, len(maps) - 1, min(len(maps), self._capacity)).round().astype(int).tolist():
                store.add(keys[at], maps[at], self._distance, np.zeros(store.count, np.float32))
        return store
