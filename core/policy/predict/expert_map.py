"""FineMoE: what an earlier pass that began alike did next, this one will do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, NamedTuple

import numpy as np

from core.policy.predict.aside import Aside
from core.policy.predict.base import Facts, Floats, Guess, Later, Predictor, View, union
from core.policy.predict.maps import MapStore, Match, Walk, best_match, select
from core.registry import Param, register


class Found(NamedTuple):
    """What a search found for one layer: experts, their softmax probability in the map, and their guesses."""

    number: int                 # of the pass
    layer: int
    told: list[tuple[float, Guess]]


@dataclass(slots=True)
class Pass:
    """One forward pass, as the searching thread follows it: nothing of it reaches a tensor of the model."""

    number: int
    tokens: int
    layers: int
    experts: int
    top_k: int
    known: Facts | None
    walk: Walk | None = None
    key: Floats | None = None

    @classmethod
    def after(cls, number: int, view: View, tokens: int) -> Pass:
        """The one that follows pass `number`."""
        return cls(number + 1, tokens, view.layers, view.experts, view.top_k, view.profile)


@register("predictor", "expert_map", title="Expert maps", help="It remembers what all routers said for earlier "
          "tokens, searches the one whose embedding, and then whose layers so far, are most like this token's, and "
          "fetches what that one used next. Searching never holds up a layer.",
          source="FineMoE sections 4.1 to 4.4",
          params=(Param("distance", "int", 3, "How many layers ahead to fetch. The layers before that many go by the "
                        "embedding alone.", title="Distance", low=1, high=16, step=1, unit="layers"),
                  Param("capacity", "int", 1000, "How many maps to remember; a full store gives up the one most like "
                        "the new one.", title="Maps", low=8, high=32000, step=8, unit="maps"),
                  Param("semantic", "bool", True, "Search by embedding for the first layers. Off: they are not "
                        "guessed.", title="By embedding"),
                  Param("dynamic", "bool", True, "Fetch more experts the less alike the map that was found is. Off: "
                        "always as many as the router selects.", title="As many as it takes"),
                  Param("learn", "bool", True, "Add every token's map to the store. Off: only the profile's are "
                        "searched.", title="Learn")))
class ExpertMap(Predictor):
    """Layers [0, d) by embedding, as the pass begins; layer l >= d by the trajectory of layers [0, l - d], as soon as
    layer l - d is routed. So every layer is searched for exactly once. The store starts from the profile's maps.

    A map of a pass over several tokens is their mean. Guesses come in the order of p / (l - l_now). What a search finds
    is used at the next layer that is reached; layer 0's comes too late, unless it is waited for (`patient`).
    """

    asks: ClassVar[bool] = True
    starts: ClassVar[bool] = True

    def __init__(self, distance: int = 3, capacity: int = 1000, semantic: bool = True, dynamic: bool = True,
                 learn: bool = True) -> None:
        self._distance, self._capacity = distance, capacity
        self._semantic, self._dynamic, self._learn = semantic, dynamic, learn
        self._aside: Aside[list[Found]] = Aside("expert maps")
        self._store: MapStore | None = None         # of the searching thread, as all that it reaches
        self._pass = Pass(0, 0, 0, 0, 0, None)
        self._begun = False

    def begin(self, view: View) -> Sequence[Guess]:
        self._pass, self._begun = Pass.after(self._pass.number, view, len(view.tokens)), True
        self._aside.do(partial(self._open, self._pass, view.embedding()))
        return self._collect(view)

    def predict(self, view: View) -> Sequence[Guess]:
        if view.layer == 0 and not self._begun:     # the model was called by somebody else than the engine
            self._pass = Pass.after(self._pass.number, view, len(view.ids))
        self._begun = False
        self._aside.do(partial(self._follow, self._pass, view.layer, view.distribution()))
        return self._collect(view)

    def close(self) -> None:
        self._aside.close()

    def _collect(self, view: View) -> list[Guess]:
        """What has been found by now for layers that are still ahead, by falling p / (l - l_now)."""
        found = self._aside.wait() if self.patient else self._aside.take()
        told = [(p / (one.layer - view.layer), guess) for some in found for one in some
                if one.number == self._pass.number and one.layer > view.layer for p, guess in one.told]
        told.sort(key=lambda pair: -pair[0])
        return [guess for _, guess in told]

    # ------------------------------------------------------------------ on the thread of its own

    def _open(self, one: Pass, embedding: Later) -> list[Found]:
        one.key = np.asarray(embedding(), np.float32)
        store = self._store = self._store or self._fill(one, len(one.key))
        if not self._semantic or self._gone(one):
            return []
        match = best_match(store.by_embedding(one.key))
        ahead = range(min(self._distance, one.layers))
        return [self._found(one, match, layer) for layer in ahead] if match is not None else []

    def _follow(self, one: Pass, layer: int, distribution: Later) -> list[Found]:
        store = self._store
        if store is None:
            return []                               # no embedding is known yet, so its size is not
        one.walk = one.walk or store.walk()
        scores = one.walk.step(distribution())
        if layer + 1 == one.layers:
            if self._learn and one.key is not None:
                store.add(one.key, np.stack(one.walk.seen), self._distance, scores)
            return []
        ahead = layer + self._distance
        match = best_match(scores) if ahead < one.layers and not self._gone(one) else None
        return [self._found(one, match, ahead)] if match is not None else []

    def _found(self, one: Pass, match: Match, layer: int) -> Found:
        assert self._store is not None
        told = self._store.maps[layer, match.place]
        chosen = select(told, match.score if self._dynamic else None, min(one.top_k * one.tokens, one.experts))
        p = told[chosen].astype(np.float64)
        with np.errstate(divide="ignore"):
            scores = union(one.tokens * np.log1p(-np.minimum(p, 1.0)), one.top_k)
        named = zip(p.tolist(), chosen.tolist(), scores.tolist(), strict=True)
        return Found(one.number, layer, [(share, Guess(layer, expert, score)) for share, expert, score in named])

    def _gone(self, one: Pass) -> bool:
        """The pass is over: what would be found for it is of no use. Searching has fallen behind."""
        return one.number != self._pass.number

    def _fill(self, one: Pass, hidden: int) -> MapStore:
        """A store with the profile's maps, evenly chosen if they are too many."""
        store, known = MapStore(self._capacity, one.layers, one.experts, hidden), one.known
        if known is not None and known.maps is not None and known.map_keys is not None:
            total = len(known.maps)
            for at in np.linspace(0, total - 1, min(total, self._capacity)).round().astype(int).tolist():
                store.add(known.map_keys[at], known.maps[at], self._distance, np.zeros(store.count, np.float32))
        return store
