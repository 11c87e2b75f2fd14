"""FineMoE's expert maps: the search against brute force, the selection by hand, and what is searched for when."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.policy.predict import Guess
from core.policy.predict.aside import AtOnce
from core.policy.predict.base import Later
from core.policy.predict.map_search import MapSearch
from core.policy.predict.maps import MapStore, best_match, select
from core.registry import create
from tests.policy.views import HIDDEN, Known, Looking, Pass, make

LAYERS, EXPERTS, K = 5, 6, 2


def cosine(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> float:
    return float(a.ravel() @ b.ravel() / np.linalg.norm(a) / np.linalg.norm(b))


def drawn(count: int, seed: int = 0) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Embeddings [count, H] and maps [count, L, E]."""
    random = np.random.default_rng(seed)
    return random.standard_normal((count, HIDDEN)), random.dirichlet(np.ones(EXPERTS), (count, LAYERS))


def filled(keys: npt.NDArray[Any], maps: npt.NDArray[Any], capacity: int) -> MapStore:
    store = MapStore(capacity, LAYERS, EXPERTS, HIDDEN)
    for key, one in zip(keys, maps, strict=True):
        store.add(key, one, 2, np.zeros(store.count, np.float32))
    return store


# ---------------------------------------------------------------------- the store

@settings(max_examples=30, deadline=None)
@given(st.integers(1, 9), st.integers(0, 99))
def test_similarity_is_the_cosine_of_all_layers_so_far(count: int, seed: int) -> None:
    keys, maps = drawn(count, seed)
    (key,), (new,) = drawn(1, seed + 1000)
    store = filled(keys, maps, 16)
    assert store.by_embedding(key) == pytest.approx([cosine(key, k) for k in keys], abs=1e-5)
    walk = store.walk()
    for layer in range(LAYERS):
        wanted = [cosine(new[: layer + 1], one[: layer + 1]) for one in maps]
        scores = walk.step(new[layer])
        assert scores == pytest.approx(wanted, abs=1e-5)
        found = best_match(scores)
        assert found is not None and wanted[found.place] == pytest.approx(max(wanted), abs=1e-5)
    assert np.stack(walk.seen) == pytest.approx(new)


def test_an_empty_store_has_no_match() -> None:
    store = MapStore(4, LAYERS, EXPERTS, HIDDEN)
    assert best_match(store.by_embedding(np.ones(HIDDEN))) is None
    assert best_match(store.walk().step(np.ones(EXPERTS))) is None


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 99), st.integers(1, 7))
def test_a_full_store_gives_up_its_most_redundant_map(seed: int, distance: int) -> None:
    keys, maps = drawn(6, seed)
    (key,), (new,) = drawn(1, seed + 1000)
    store = filled(keys, maps, 6)
    walk = store.walk()
    for layer in range(LAYERS):
        scores = walk.step(new[layer])
    share = min(distance, LAYERS) / LAYERS
    redundancy = [share * cosine(key, k) + (1 - share) * cosine(new, one) for k, one in zip(keys, maps, strict=True)]
    place = store.add(key, new, distance, scores)
    assert redundancy[place] == pytest.approx(max(redundancy), abs=1e-5)
    assert store.count == 6
    assert store.maps[:, place] == pytest.approx(new)
    maps[place], keys[place] = new, key                   # what is searched from now on
    (other,), (after,) = drawn(1, seed + 2000)
    assert store.by_embedding(other) == pytest.approx([cosine(other, k) for k in keys], abs=1e-5)
    assert store.walk().step(after[0]) == pytest.approx([cosine(after[0], one[0]) for one in maps], abs=1e-5)


def test_redundancy_by_hand() -> None:
    """d/L = 2/5. Map 0 shares the embedding alone, map 1 the trajectory alone: the trajectory weighs more."""
    key, other = np.eye(HIDDEN)[0], np.eye(HIDDEN)[1]
    way, elsewhere = np.tile(np.eye(EXPERTS)[0], (LAYERS, 1)), np.tile(np.eye(EXPERTS)[1], (LAYERS, 1))
    for distance, place in ((2, 1), (3, 0)):
        store = filled(np.stack((key, other)), np.stack((elsewhere, way)), 2)
        walk = store.walk()
        for layer in range(LAYERS):
            scores = walk.step(way[layer])
        assert store.add(key, way, distance, scores) == place


# ---------------------------------------------------------------------- the selection

def test_the_selection_by_hand() -> None:
    p = np.array([0.1, 0.4, 0.2, 0.3])
    assert select(p, 0.9, 1).tolist() == [1]               # delta .1: the first is enough
    assert select(p, 0.55, 1).tolist() == [1, 3]           # delta .45 > .4
    assert select(p, 0.55, 3).tolist() == [1, 3, 2]        # but at least 3
    assert select(p, 0.3, 1).tolist() == [1, 3]            # delta .7 = .4 + .3
    assert select(p, -0.5, 1).tolist() == [1, 3, 2, 0]     # delta is at most 1
    assert select(p, 1.5, 2).tolist() == [1, 3]            # and at least 0
    assert select(p, None, 2).tolist() == [1, 3]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 999), st.floats(-1, 1), st.integers(1, EXPERTS))
def test_the_selection_is_the_shortest_that_suffices(seed: int, score: float, least: int) -> None:
    p = np.random.default_rng(seed).dirichlet(np.ones(EXPERTS)).astype(np.float32)
    chosen, delta = select(p, score, least).tolist(), min(1.0, max(0.0, 1.0 - score))
    order = sorted(range(EXPERTS), key=lambda e: -p[e])
    enough = next(n for n in range(1, EXPERTS + 1) if p[order[:n]].sum() >= delta - 1e-6)
    assert chosen == order[: max(least, enough)]


# ---------------------------------------------------------------------- the predictor

class Slow(AtOnce):
    """Works on what it was given only when it is told to."""

    def __init__(self, worker: MapSearch) -> None:
        super().__init__(worker)
        self._given: list[bytes] = []

    @property
    def behind(self) -> int:  # type: ignore[override]
        return len(self._given)

    def give(self, message: bytes) -> None:
        self._given.append(message)

    def work(self) -> None:
        for message in self._given:
            super().give(message)
        self._given.clear()


class Told(Looking):
    """A token whose routers say `distributions` [L, E], with an embedding."""

    def __init__(self, layer: int, distributions: npt.NDArray[Any], embedding: npt.NDArray[Any],
                 known: Known | None = None, tokens: int = 1) -> None:
        ids = np.argsort(-distributions, 1)[:, None, :K].repeat(tokens, 1)
        super().__init__(Pass(1, ids), layer, EXPERTS, True, known)
        self._told, self._vector = distributions, embedding

    def distribution(self) -> Later:
        return Later(lambda: self._told[self.layer].astype(np.float32))

    def embedding(self) -> Later:
        return Later(lambda: self._vector.astype(np.float32))


def walk(predictor: Any, distributions: npt.NDArray[Any], embedding: npt.NDArray[Any], known: Known | None = None,
         tokens: int = 1) -> list[Sequence[Guess]]:
    """What it names as the pass begins and at each layer."""
    return [predictor.begin(Told(-1, distributions, embedding, known, tokens)),
            *(predictor.predict(Told(layer, distributions, embedding, known, tokens)) for layer in range(LAYERS))]


@pytest.mark.parametrize("distance", [1, 2, 3, 4, 5, 9])
def test_every_layer_is_searched_for_once_and_d_layers_ahead(distance: int) -> None:
    keys, maps = drawn(4)
    predictor = make("expert_map", distance=distance)
    told = walk(predictor, maps[0], keys[0], Known(maps=maps, map_keys=keys))
    layers = [sorted({g.layer for g in guesses}) for guesses in told]
    assert layers[0] == list(range(min(distance, LAYERS)))
    assert layers[1:] == [[layer + distance] if layer + distance < LAYERS else [] for layer in range(LAYERS)]
    predictor.close()


def test_the_first_layers_go_by_embedding_and_the_others_by_the_trajectory() -> None:
    keys, maps = drawn(4)
    predictor = make("expert_map", distance=2, dynamic=False, learn=False)
    # The embedding is that of map 3, the routers say what map 1 says.
    told = walk(predictor, maps[1], keys[3], Known(maps=maps, map_keys=keys))
    named = {layer: [g.expert for guesses in told for g in guesses if g.layer == layer] for layer in range(LAYERS)}
    for layer in range(LAYERS):
        wanted = np.argsort(-maps[3 if layer < 2 else 1][layer])[:K]
        assert named[layer] == wanted.tolist()
    predictor.close()


def test_trajectory_alone_leaves_the_first_layers_out() -> None:
    keys, maps = drawn(4)
    predictor = make("expert_map", distance=2, semantic=False)
    told = walk(predictor, maps[1], keys[3], Known(maps=maps, map_keys=keys))
    assert {g.layer for guesses in told for g in guesses} == {2, 3, 4}
    predictor.close()


def test_more_experts_are_named_the_less_alike_the_map_is() -> None:
    keys, maps = drawn(1)
    known = Known(maps=maps, map_keys=keys)
    for embedding, count in ((keys[0], K), (-keys[0], EXPERTS)):
        predictor = make("expert_map", distance=3)
        begun = walk(predictor, maps[0], embedding, known)[0]
        assert [sum(g.layer == layer for g in begun) for layer in range(3)] == [count] * 3
        predictor.close()


def test_guesses_come_by_probability_over_distance_and_score_the_chance_of_being_asked() -> None:
    keys, maps = drawn(1)
    maps[0] = np.tile([0.05, 0.5, 0.3, 0.1, 0.03, 0.02], (LAYERS, 1))
    predictor = make("expert_map", distance=2, dynamic=False)
    begun = walk(predictor, maps[0], keys[0], Known(maps=maps, map_keys=keys))[0]
    # Layer 0 is one away: .5, .3; layer 1 two: .25, .15.
    assert [(g.layer, g.expert) for g in begun] == [(0, 1), (0, 2), (1, 1), (1, 2)]
    assert [g.score for g in begun[:2]] == pytest.approx([1 - 0.5**2, 1 - 0.7**2])
    predictor.close()


def test_a_pass_of_many_tokens_names_experts_for_all_of_them() -> None:
    keys, maps = drawn(1)
    maps[0] = np.tile([0.05, 0.5, 0.3, 0.1, 0.03, 0.02], (LAYERS, 1))
    predictor = make("expert_map", distance=1, dynamic=False)
    begun = walk(predictor, maps[0], keys[0], Known(maps=maps, map_keys=keys), tokens=2)[0]
    assert [g.expert for g in begun] == [1, 2, 3, 0]
    assert begun[0].score == pytest.approx(1 - 0.5**4)
    predictor.close()


def test_it_learns_from_what_it_sees() -> None:
    keys, maps = drawn(3)
    predictor = make("expert_map", distance=2, dynamic=False)
    assert all(not guesses for guesses in walk(predictor, maps[0], keys[0]))
    for key, one in zip(keys[1:], maps[1:], strict=True):
        walk(predictor, one, key)
    told = walk(predictor, maps[1], keys[1])
    for layer in range(LAYERS):
        named = [g.expert for guesses in told for g in guesses if g.layer == layer]
        assert named == np.argsort(-maps[1][layer])[:K].tolist()
    predictor.close()


def test_without_learning_only_the_profile_is_searched() -> None:
    keys, maps = drawn(3)
    predictor = make("expert_map", learn=False)
    walk(predictor, maps[0], keys[0])
    assert all(not guesses for guesses in walk(predictor, maps[0], keys[0]))
    predictor.close()


def test_more_maps_in_the_profile_than_there_is_room_for() -> None:
    keys, maps = drawn(40)
    predictor = make("expert_map", capacity=8, distance=1, dynamic=False)
    begun = walk(predictor, maps[39], keys[39], Known(maps=maps, map_keys=keys))[0]
    assert [g.expert for g in begun] == np.argsort(-maps[39][0])[:K].tolist()    # the last is among those kept
    store = predictor.beside._worker.store  # type: ignore[union-attr]
    assert store.capacity == store.count == 8
    predictor.close()


def test_no_layer_waits_for_a_search_and_what_comes_too_late_is_not_used() -> None:
    keys, maps = drawn(2)
    known = Known(maps=maps, map_keys=keys)
    predictor: Any = create("predictor", "expert_map", {"distance": 2})
    predictor.beside = slow = Slow(MapSearch(predictor.task(Told(-1, maps[0], keys[0], known))))
    assert all(not guesses for guesses in walk(predictor, maps[0], keys[0], known))
    slow.work()                                           # the whole pass has been searched for by now ...
    late = predictor.begin(Told(-1, maps[0], keys[0], known))
    assert not late                                       # ... and is of no use to the next one
    slow.work()
    assert {g.layer for g in predictor.predict(Told(0, maps[0], keys[0], known))} == {1}    # layer 0 is reached already


def test_a_search_that_falls_behind_leaves_passes_out() -> None:
    keys, maps = drawn(2)
    predictor: Any = create("predictor", "expert_map", {"distance": 2})
    predictor.beside = slow = Slow(MapSearch(predictor.task(Told(-1, maps[0], keys[0]))))
    for _ in range(9):
        walk(predictor, maps[0], keys[0])
    assert slow.behind == (LAYERS + 1) * 2                # two passes, of a message as it begins and one a layer
    slow.work()
    assert slow._worker.store.count == 2
    walk(predictor, maps[1], keys[1])
    slow.work()
    assert slow._worker.store.count == 3


def test_numbers_that_the_device_still_works_out_are_sent_when_they_are_there() -> None:
    keys, maps = drawn(2)
    known, there = Known(maps=maps, map_keys=keys), list[bool]([False])

    class Computing(Told):
        def embedding(self) -> Later:
            return Later(lambda: self._vector.astype(np.float32), lambda: there[0])

    predictor: Any = create("predictor", "expert_map", {"distance": 2})
    assert list(predictor.begin(Computing(-1, maps[0], keys[0], known))) == []
    assert list(predictor.predict(Computing(0, maps[0], keys[0], known))) == []
    there[0] = True
    assert {g.layer for g in predictor.predict(Computing(1, maps[0], keys[0], known))} == {2, 3}    # in their order


def test_a_search_that_fails_is_heard_of() -> None:
    keys, maps = drawn(1)
    predictor = make("expert_map")

    class Broken(Told):
        def embedding(self) -> Later:
            def fail() -> npt.NDArray[np.float32]:
                raise ZeroDivisionError("the copy failed")
            return Later(fail)

    with pytest.raises(ZeroDivisionError, match="the copy failed"):
        predictor.begin(Broken(-1, maps[0], keys[0]))
    predictor.close()
    predictor.close()
