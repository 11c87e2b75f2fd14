"""FineMoE's expert maps: the search against brute force, and the selection by hand."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.policy.predict.maps import MapStore, best_match, select
from tests.policy.views import HIDDEN
from tests.selection import examples

LAYERS, EXPERTS, K = 5, 6, 2


def cosine(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> float:
    return float(a.ravel() @ b.ravel() / np.linalg.norm(a) / np.linalg.norm(b))


def drawn(count: int, seed: int = 0) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    random = np.random.default_rng(seed)
    return random.standard_normal((count, HIDDEN)), random.dirichlet(np.ones(EXPERTS), (count, LAYERS))


def filled(keys: npt.NDArray[Any], maps: npt.NDArray[Any], capacity: int) -> MapStore:
    store = MapStore(capacity, LAYERS, EXPERTS, HIDDEN)
    for key, one in zip(keys, maps, strict=True):
        store.add(key, one, 2, np.zeros(store.count, np.float32))
    return store


@examples(30)
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


@examples(30)
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
    maps[place], keys[place] = new, key  # what is searched from now on
    (other,), (after,) = drawn(1, seed + 2000)
    assert store.by_embedding(other) == pytest.approx([cosine(other, k) for k in keys], abs=1e-5)
    assert store.walk().step(after[0]) == pytest.approx([cosine(after[0], one[0]) for one in maps], abs=1e-5)


@examples(60)
@given(st.integers(0, 999), st.floats(-1.5, 1.5), st.integers(1, EXPERTS))
def test_the_selection_is_the_shortest_that_suffices(seed: int, score: float, least: int) -> None:
    p = np.random.default_rng(seed).dirichlet(np.ones(EXPERTS)).astype(np.float32)
    chosen, delta = select(p, score, least).tolist(), min(1.0, max(0.0, 1.0 - score))
    order = sorted(range(EXPERTS), key=lambda e: -p[e])
    enough = next(n for n in range(1, EXPERTS + 1) if p[order[:n]].sum() >= delta - 1e-6)
    assert chosen == order[: max(least, enough)]
    assert select(p, None, least).tolist() == order[:least]
