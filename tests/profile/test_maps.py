"""The expert map store: a worked example of RDY, and many at once as one after another."""

from __future__ import annotations

import numpy as np
import pytest

from core.measure.calibrate.maps import MapCollection


def test_the_most_redundant_gives_way() -> None:
    """Two layers of two experts, distance 1: RDY = .5 cos(embeddings) + .5 cos(maps). The new one has the embedding of
    the first and the map of the second. Towards the first: .5 * 1 + .5 * 0 = .5; towards the second, whose embedding
    has a cosine of .6: .5 * .6 + .5 * 1 = .8. So the second goes."""
    store = MapCollection(2, 2, 2, capacity=2, distance=1)
    left, right = [[1.0, 0.0], [1.0, 0.0]], [[0.0, 1.0], [0.0, 1.0]]
    store.add(np.array([[1, 0], [0.6, 0.8]], np.float32), np.array([left, right], np.float32))
    store.add(np.array([[2, 0]], np.float32), np.array([right], np.float32))
    assert store.keys().tolist() == [[1, 0], [2, 0]]
    assert store.maps().tolist() == [left, right]
    assert store.maps().dtype == store.keys().dtype == np.float16


@pytest.mark.parametrize("distance", [1, 3, 99])
def test_many_at_once_are_one_after_another(distance: int) -> None:
    rng = np.random.default_rng(distance)
    layers, experts, hidden, capacity, n = 4, 6, 5, 20, 130
    keys = rng.standard_normal((n, hidden)).astype(np.float32)
    maps = rng.dirichlet([0.3] * experts, (n, layers)).astype(np.float32)
    store = MapCollection(layers, experts, hidden, capacity, distance)
    for part in np.array_split(np.arange(n), [3, 20, 22, 90, 91]):
        store.add(keys[part], maps[part])

    share, kept = min(distance, layers) / layers, list(range(capacity))
    for new in range(capacity, n):

        def cos(a: np.ndarray, b: np.ndarray) -> float:
            return float(a.ravel() @ b.ravel() / np.linalg.norm(a) / np.linalg.norm(b))

        redundancy = [share * cos(keys[new], keys[old]) + (1 - share) * cos(maps[new], maps[old]) for old in kept]
        kept[int(np.argmax(redundancy))] = new
    np.testing.assert_array_equal(store.keys(), keys[kept].astype(np.float16))
    np.testing.assert_array_equal(store.maps(), maps[kept].astype(np.float16))


def test_a_store_that_is_not_full_has_what_there_was() -> None:
    store = MapCollection(2, 3, 4)
    store.add(np.ones((3, 4), np.float32), np.ones((3, 2, 3), np.float32))
    assert store.maps().shape == (3, 2, 3) and store.keys().shape == (3, 4)
